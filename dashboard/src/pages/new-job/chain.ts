// The chain of algorithms of a request: what can be added, and where.
import type { Algorithm } from "./body";
import { controlOf, resolve, type Schema, unwrap } from "./schema";

/** What the service's JSON schema of a config says about algorithms: the options of each, by name. */
export type Algorithms = Record<string, Schema>;

/** SmoothQuant has two names: that of AMD Quark's files is not offered. */
const OTHER_NAME = "smooth";

export function algorithmsIn(root: Schema): Algorithms {
  const list = root.properties?.algo_config;
  const control = list && controlOf(list, root);
  return control?.kind === "variants" ? control.variants : {};
}

/** The names in the order of the schema: what changes weights, then what rounds them, then what corrects. */
function inOrder(root: Schema): string[] {
  const algorithms = algorithmsIn(root);
  const places = (root.properties?.algo_config?.items?.oneOf ?? []).map((each) => resolve(each, root).title);
  return Object.keys(algorithms).sort(
    (one, other) => places.indexOf(algorithms[one]?.title) - places.indexOf(algorithms[other]?.title),
  );
}

/** The algorithms that can still be added: each is used once. */
export const choices = (chain: Algorithm[], root: Schema) => {
  const used = chain.map(({ name }) => (name === OTHER_NAME ? "smoothquant" : name));
  return inOrder(root).filter((name) => name !== OTHER_NAME && !used.includes(name));
};

/** The chain with `name` before the first algorithm that the schema lists after it. */
export function withAdded(chain: Algorithm[], name: string, root: Schema): Algorithm[] {
  const order = inOrder(root);
  const later = chain.findIndex((each) => order.indexOf(each.name) > order.indexOf(name));
  const at = later < 0 ? chain.length : later;
  return [...chain.slice(0, at), { name }, ...chain.slice(at)];
}

/** The chain with the algorithm at `index` one place earlier (-1) or later (1). */
export function withMoved(chain: Algorithm[], index: number, step: -1 | 1): Algorithm[] {
  const [one, other] = [chain[index], chain[index + step]];
  if (!one || !other) return chain;
  return chain.map((each, place) => (place === index ? other : place === index + step ? one : each));
}

/** The chain without the options that have their defaults. */
export function withoutDefaults(chain: Algorithm[], root: Schema): Algorithm[] {
  const algorithms = algorithmsIn(root);
  return chain.map(({ name, ...options }) => {
    const properties = algorithms[name]?.properties ?? {};
    const isSet = ([option, value]: [string, unknown]) =>
      JSON.stringify(value) !== JSON.stringify(properties[option]?.default);
    return { name, ...Object.fromEntries(Object.entries(options).filter(isSet)) };
  });
}

/** The options of an algorithm that a form can show: those with a help text, and the others. */
export function optionsOf(name: string, root: Schema): { usual: [string, Schema][]; others: [string, Schema][] } {
  const shown = Object.entries(algorithmsIn(root)[name]?.properties ?? {}).filter(
    ([option, schema]) => option !== "name" && controlOf(unwrap(schema, root).schema, root).kind !== "const",
  );
  const isUsual = ([, { description }]: [string, Schema]) => description !== undefined;
  return { usual: shown.filter(isUsual), others: shown.filter((each) => !isUsual(each)) };
}
