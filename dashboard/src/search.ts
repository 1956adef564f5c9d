// What the addresses of pages hold, so that links can be shared: names and texts, and nothing that is read as JSON.

export const BASE = "/ui";

export type Params = Record<string, string | string[] | undefined>;

/** The parameters of an address. One that is there several times is a list. */
export function parseSearch(text: string): Params {
  const search = new URLSearchParams(text);
  const listOf = (name: string) => (search.getAll(name).length > 1 ? search.getAll(name) : (search.get(name) ?? ""));
  return Object.fromEntries([...search.keys()].map((name) => [name, listOf(name)]));
}

/** The query string for parameters: a list has each of its values, undefined leaves a parameter out. */
export function stringifySearch(params: Params): string {
  const pairs = Object.entries(params).flatMap(([name, value]) => [value ?? []].flat().map((each) => [name, each]));
  return pairs.length ? `?${new URLSearchParams(pairs)}` : "";
}

type Read<Text extends string, List extends string> = { [name in Text]?: string } & { [name in List]?: string[] };

/** A reader of typed parameters, in their order: those that are one text each, and those that are lists. */
const reader =
  <Text extends string = never, List extends string = never>(texts: Text[], lists: List[] = []) =>
  (params: Params) => {
    const typed: Params = {};
    for (const [name, value] of Object.entries(params)) {
      const values = [value ?? []].flat();
      if (texts.some((text) => text === name)) typed[name] = values[0];
      if (lists.some((list) => list === name)) typed[name] = values;
    }
    return typed as Read<Text, List>;
  };

/** The filters of the list of runs, under the names that the API has for them. */
export const FILTERS = ["state", "q", "label", "sweep", "model"] as const;
const LISTS = FILTERS.filter((name) => name !== "q");

export const readRuns = reader(["q", "cursor", "order", "group"], [...LISTS, "column"]);
export const readCompare = reader(
  ["q", "created_before", "base", "sort", "metric", "kind"],
  [...LISTS, "job", "layers"],
);
export const readRun = reader(["tab", "line"]);
export const readNewJob = reader([
  ...(["from", "path", "preset"] as const),
  ...(["effort", "algorithms", "num_windows", "runtime", "device", "gate", "more_bits"] as const),
]);
export const readModels = reader(["model", "cursor"]);
export const readRegistry = reader(["name", "cursor"]);
export const readDatasets = reader(["cursor"]);
export const readQueue = reader(["cursor"]);
export const readAudit = reader(["action", "object_id", "cursor"]);

export type RunsSearch = ReturnType<typeof readRuns>;
export type CompareSearch = ReturnType<typeof readCompare>;

/** The filters of the list alone, without its page, its order and what it shows. */
export const listFiltersOf = ({ q, label, sweep, model, state }: RunsSearch) => ({ q, label, sweep, model, state });
