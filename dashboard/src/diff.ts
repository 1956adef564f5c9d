// The differences between two JSON values.

export interface Difference {
  /** For example /global_quant_config/weight/group_size. */
  pointer: string;
  before: unknown;
  after: unknown;
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

const isEmpty = (value: unknown) =>
  value === undefined ||
  value === null ||
  (Array.isArray(value) && value.length === 0) ||
  (isObject(value) && Object.keys(value).length === 0);

/** The leaves that differ. Absent, null and empty are equal: the engine fills in the same default for each. */
export function differences(before: unknown, after: unknown, pointer = ""): Difference[] {
  if (isEmpty(before) && isEmpty(after)) return [];
  if ((isObject(before) || isEmpty(before)) && (isObject(after) || isEmpty(after))) {
    const [from, to] = [isObject(before) ? before : {}, isObject(after) ? after : {}];
    const names = new Set([...Object.keys(from), ...Object.keys(to)]);
    return [...names].flatMap((name) => differences(from[name], to[name], `${pointer}/${escapePointer(name)}`));
  }
  return JSON.stringify(before) === JSON.stringify(after) ? [] : [{ pointer, before, after }];
}

const escapePointer = (name: string) => name.replaceAll("~", "~0").replaceAll("/", "~1");

export const asText = (value: unknown) =>
  value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
