import { expect, it } from "vitest";
import type { Body } from "./body";
import { searchOf, withChanges, withMoreBits } from "./steps";

const BODY = { model: { path: "/m" }, config: { preset: "w4a16", algo_config: [{ name: "rtn" }] } } as Body;
const applied = (changes: Record<string, unknown>, body = BODY) => withChanges(body, searchOf(changes));

it("fills in the form with what a step of a verdict changes", () => {
  expect(applied({ effort: "best" })).toEqual({ model: { path: "/m" }, config: { preset: "w4a16" }, effort: "best" });
  const chain = [{ name: "yaqa" }, { name: "distill" }];
  expect(applied({ config: { algo_config: chain } }, { ...BODY, effort: "fast" })).toEqual({
    model: { path: "/m" },
    config: { preset: "w4a16", algo_config: chain },
  });
  expect(applied({ evaluation: { num_windows: 32 } }, { ...BODY, evaluation: { seq_len: 64 } })).toEqual({
    ...BODY,
    evaluation: { seq_len: 64, num_windows: 32 },
  });
  const goal = { runtime: "vllm", device: "24GB" };
  expect(applied({ goal })).toEqual({ model: { path: "/m" }, goal });
  expect(withChanges(BODY, { gate: "warn" })).toEqual({ ...BODY, gate: "warn" });
  expect(withChanges(BODY, {})).toEqual(BODY);
});

it("gives more bits to layers by a whole config, without an effort that would conflict with it", () => {
  const config = { global_quant_config: {}, layer_quant_config: { a: {} }, algo_config: [{ name: "gptq" }] };
  const step = { text: "", flags: "", changes: { config, export: ["compressed_tensors"] } };
  expect(withMoreBits({ ...BODY, effort: "best" }, step)).toEqual({ ...BODY, config, export: ["compressed_tensors"] });
});
