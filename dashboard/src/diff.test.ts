import { expect, it } from "vitest";
import { differences } from "./diff";

it("finds each leaf that differs, with its pointer", () => {
  const before = { weight: { dtype: "int8", group_size: 64 }, exclude: ["lm_head"] };
  const after = { weight: { dtype: "uint4", group_size: 64 }, exclude: ["lm_head", "*.gate"] };
  expect(differences(before, after)).toEqual([
    { pointer: "/weight/dtype", before: "int8", after: "uint4" },
    { pointer: "/exclude", before: ["lm_head"], after: ["lm_head", "*.gate"] },
  ]);
});

it("takes absent, null and empty for one", () => {
  expect(differences({ a: null, b: [], c: {} }, {})).toEqual([]);
});

it("goes into what only one side has", () => {
  expect(differences({}, { "a/b": { "c~": 1 } })).toEqual([{ pointer: "/a~1b/c~0", before: undefined, after: 1 }]);
});
