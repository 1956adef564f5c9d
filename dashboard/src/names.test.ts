import { expect, it } from "vitest";
import type { Goal, Job, Recipe } from "./api/types";
import { goalText, modelText, nameOf, recipeText } from "./names";

const RECIPE: Recipe = { preset: null, mix: null, goal: null, algorithms: [] };

it("says in short what a result was made with", () => {
  expect(recipeText({ ...RECIPE, preset: "w4a16", algorithms: ["smooth", "gptq"] })).toBe("w4a16 + smooth + gptq");
  expect(recipeText({ ...RECIPE, mix: { schemes: ["w4a16", "keep"], max_bits: 5 } })).toBe("mix of w4a16, keep");
  expect(recipeText({ ...RECIPE, goal: { runtime: "vllm", device: "24GB" }, algorithms: null })).toBe(
    "goal: vLLM on 24GB",
  );
  expect(recipeText(RECIPE)).toBe("custom");
});

it("names a model in an artifact after the run that made it", () => {
  const folder = `/data/artifacts/job_01a200dc5edf7cfaa251b183f95c582d/${"a".repeat(64)}`;
  expect(modelText(folder)).toBe("job_…5c582d");
  expect(modelText(`${folder}/quark`)).toBe("job_…5c582d/quark");
  expect(modelText("/models/tiny")).toBe("tiny");
  expect(modelText("org/name")).toBe("name");
});

it("calls a run without a name after its model and recipe", () => {
  const job = {
    name: null,
    model: { path: "/models/tiny" },
    preset: "w4a16",
    mix: null,
    config: { algo_config: [{ name: "gptq" }] },
  } as unknown as Job;
  expect(nameOf(job)).toBe("tiny w4a16 + gptq");
  expect(nameOf({ ...job, preset: "fp8", config: {} })).toBe("tiny fp8");
  expect(nameOf({ ...job, name: "mine" })).toBe("mine");
});

it("says what a goal asks for", () => {
  const goal: Goal = { runtime: "vllm", device: "24GB", context: 8192, min_recovery: 0.98 };
  expect(goalText(goal)).toBe("At least 98.0 % recovery in vLLM on 24GB, context of 8192 tokens");
  const best: Goal = { ...goal, min_recovery: "best", max_size: "110MB", max_time_s: 1800 };
  expect(goalText(best)).toContain("The best recovery in vLLM on 24GB");
  expect(goalText(best)).toContain("at most 110MB, searched for at most 30 min");
});
