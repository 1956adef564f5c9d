// The subset of JSON Schema that the config uses, mapped to kinds of form controls.

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  type?: string;
  title?: string;
  description?: string;
  default?: unknown;
  const?: unknown;
  enum?: string[];
  anyOf?: Schema[];
  oneOf?: Schema[];
  items?: Schema;
  prefixItems?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
  additionalProperties?: Schema | boolean;
  discriminator?: { propertyName: string; mapping: Record<string, string> };
  minimum?: number;
  maximum?: number;
}

export type Control =
  | { kind: "const" }
  | { kind: "choice"; options: string[] }
  | { kind: "switch" }
  | { kind: "number"; whole: boolean }
  | { kind: "text" }
  | { kind: "texts" }
  | { kind: "object"; properties: Record<string, Schema>; required: string[] }
  | { kind: "map"; values: Schema }
  | { kind: "variants"; name: string; variants: Record<string, Schema> }
  | { kind: "json" };

export function resolve(schema: Schema, root: Schema): Schema {
  const name = schema.$ref?.replace("#/$defs/", "");
  if (!name) return schema;
  const target = root.$defs?.[name];
  return target ? { ...target, ...without(schema, "$ref") } : {};
}

function without<T extends object>(value: T, name: keyof T): Partial<T> {
  const { [name]: _, ...rest } = value;
  return rest as Partial<T>;
}

/** The schema without its null option, and whether it had one. */
export function unwrap(schema: Schema, root: Schema): { schema: Schema; nullable: boolean } {
  const resolved = resolve(schema, root);
  const options = resolved.anyOf;
  if (!options) return { schema: resolved, nullable: false };
  const real = options.filter((option) => option.type !== "null");
  const nullable = real.length < options.length;
  const only = real.length === 1 ? real[0] : undefined;
  if (!only) return { schema: resolved, nullable };
  return {
    schema: { ...resolve(only, root), description: resolved.description ?? resolve(only, root).description },
    nullable,
  };
}

export function controlOf(schema: Schema, root: Schema): Control {
  if (schema.const !== undefined) return { kind: "const" };
  if (schema.enum) return { kind: "choice", options: schema.enum };
  if (schema.type === "boolean") return { kind: "switch" };
  if (schema.type === "integer" || schema.type === "number")
    return { kind: "number", whole: schema.type === "integer" };
  if (schema.type === "string") return { kind: "text" };
  if (schema.type === "array" && schema.items) {
    const items = resolve(schema.items, root);
    if (items.type === "string") return { kind: "texts" };
    if (items.discriminator && items.oneOf) {
      const name = items.discriminator.propertyName;
      const variants = Object.entries(items.discriminator.mapping).map(([key, ref]) => [
        key,
        resolve({ $ref: ref }, root),
      ]);
      return { kind: "variants", name, variants: Object.fromEntries(variants) };
    }
  }
  if (schema.type === "object" && schema.properties) {
    return { kind: "object", properties: schema.properties, required: schema.required ?? [] };
  }
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return { kind: "map", values: schema.additionalProperties };
  }
  return { kind: "json" };
}
