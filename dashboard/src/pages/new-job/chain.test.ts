import { expect, it } from "vitest";
import { choices, optionsOf, withAdded, withMoved, withoutDefaults } from "./chain";
import type { Schema } from "./schema";
import { firstLine } from "./schema-form";

const options = (title: string, properties: Record<string, Schema> = {}): Schema => ({
  type: "object",
  title,
  properties: { name: { const: title.toLowerCase() }, ...properties },
});
const ROOT: Schema = {
  properties: {
    algo_config: {
      type: "array",
      items: {
        oneOf: [
          { $ref: "#/$defs/Smooth" },
          { $ref: "#/$defs/AWQ" },
          { $ref: "#/$defs/GPTQ" },
          { $ref: "#/$defs/Bias" },
        ],
        discriminator: {
          propertyName: "name",
          mapping: {
            awq: "#/$defs/AWQ",
            bias: "#/$defs/Bias",
            gptq: "#/$defs/GPTQ",
            smooth: "#/$defs/Smooth",
            smoothquant: "#/$defs/Smooth",
          },
        },
      },
    },
  },
  $defs: {
    Smooth: options("Smooth", { name: { enum: ["smooth", "smoothquant"] } }),
    AWQ: options("AWQ"),
    GPTQ: options("GPTQ", {
      damp: { anyOf: [{ type: "number" }, { type: "null" }], default: null, description: "Share that is added." },
      block_size: { type: "integer", default: 128 },
      only_false: { anyOf: [{ const: false }, { type: "null" }], default: null, description: "Never shown." },
      layers: { type: "array", items: { type: "string" }, default: [] },
    }),
    Bias: options("Bias"),
  },
};
const names = (chain: { name: string }[]) => chain.map(({ name }) => name).join();

it("adds an algorithm where the schema's order has it, once", () => {
  expect(names(withAdded([{ name: "gptq" }], "awq", ROOT))).toBe("awq,gptq");
  expect(names(withAdded([{ name: "gptq" }], "bias", ROOT))).toBe("gptq,bias");
  expect(names(withAdded([{ name: "smooth" }, { name: "bias" }], "gptq", ROOT))).toBe("smooth,gptq,bias");
  expect(names(withAdded([], "gptq", ROOT))).toBe("gptq");
  expect(choices([{ name: "gptq" }], ROOT)).toEqual(["smoothquant", "awq", "bias"]);
  expect(choices([{ name: "smooth" }], ROOT)).toEqual(["awq", "gptq", "bias"]);
  expect(choices([], {})).toEqual([]);
});

it("moves an algorithm within the chain only", () => {
  const chain = [{ name: "a" }, { name: "b" }, { name: "c" }];
  expect(names(withMoved(chain, 2, -1))).toBe("a,c,b");
  expect(names(withMoved(chain, 0, 1))).toBe("b,a,c");
  expect(withMoved(chain, 0, -1)).toBe(chain);
  expect(withMoved(chain, 2, 1)).toBe(chain);
});

it("leaves out what is the default anyway", () => {
  const chain = [
    { name: "gptq", damp: null, block_size: 64, layers: [] },
    { name: "unknown", x: 1 },
  ];
  expect(withoutDefaults(chain, ROOT)).toEqual([
    { name: "gptq", block_size: 64 },
    { name: "unknown", x: 1 },
  ]);
});

it("shows the options with a help text before the others, and none that has one value", () => {
  const { usual, others } = optionsOf("gptq", ROOT);
  expect(usual.map(([name]) => name)).toEqual(["damp"]);
  expect(others.map(([name]) => name)).toEqual(["block_size", "layers"]);
  for (const name of ["smoothquant", "unknown"]) expect(optionsOf(name, ROOT)).toEqual({ usual: [], others: [] });
});

it("the first sentence of a description does not end at its authors", () => {
  expect(firstLine("GPTQ (Frantar et al. 2022): rounds ``columns``. More.\nLast.")).toBe(
    "GPTQ (Frantar et al. 2022): rounds columns.",
  );
});
