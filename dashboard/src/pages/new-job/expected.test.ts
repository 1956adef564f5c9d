import { expect, it } from "vitest";
import type { ModelResult } from "../../api/types";
import { type Body, START_GOAL, START_MIX } from "./body";
import { algorithmsText, calibrationText, expectedTime, knownResult } from "./expected";

const result = (job_id: string, recipe: object, verdict: string | null = "good") =>
  ({ job_id, recipe: { preset: null, mix: null, goal: null, algorithms: null, ...recipe }, verdict }) as ModelResult;
const RESULTS = [
  result("running", { preset: "w4a16" }, null),
  result("mixed", { mix: { schemes: ["w4a16"] } }),
  result("llama", { goal: { runtime: "llama_cpp", device: "24GB" } }),
  result("goal", { goal: { runtime: "vllm", device: "24GB", context: 8192 } }),
  result("preset", { preset: "w4a16" }),
];
const known = (body: Partial<Body>) => knownResult({ model: {}, ...body }, RESULTS)?.job_id;

it("the result to expect is one with the same preset, or for the same runtime and device", () => {
  expect(known({ config: { preset: "w4a16" } })).toBe("preset");
  expect(known({ goal: START_GOAL })).toBe("goal");
  expect(known({ goal: { ...START_GOAL, device: "h100" } })).toBeUndefined();
  expect(known({ mix: START_MIX })).toBeUndefined();
  expect(known({ config: { global_quant_config: {} } })).toBeUndefined();
});

it("says what a time is known from, and that it is not", () => {
  expect(expectedTime({ time_s: 90 })).toBe("about 1 min 30 s, as earlier runs of this model with these settings");
  const rough = "about 2 min 0 s, roughly: as earlier runs of this model and preset with other settings";
  expect(expectedTime({ time_s: null, rough_time_s: 120 })).toBe(rough);
  expect(expectedTime({ time_s: null, rough_time_s: null })).toContain("not known");
});

it("says whether a job calibrates, and that a candidate of a goal may", () => {
  const text = (plan: object) => calibrationText({ needs_calibration: false, executor: "streamed", ...plan });
  expect(text({ needs_calibration: true })).toBe("required");
  expect(text({ executor: "file_to_file" })).toBe("not used");
  expect(text({ possible_chains: [["gptq"], []] })).toBe("if a chosen scheme needs it");
  expect([text({ possible_chains: [[]] }), text({})]).toEqual(["evaluation only", "evaluation only"]);
});

it("names the algorithms, and those that a candidate can have", () => {
  expect(algorithmsText({ config: { algo_config: [{ name: "awq" }, { name: "gptq" }] } })).toBe("awq, gptq");
  expect(algorithmsText({ config: {} })).toBe("none (rounds to nearest)");
  expect(algorithmsText({ config: {}, possible_chains: [["gptq"]] })).toBe("gptq for the first candidate");
  expect(algorithmsText({ config: {}, possible_chains: [["gptq"], []] })).toBe(
    "gptq or none (rounds to nearest) for the first candidate, depending on its schemes",
  );
});
