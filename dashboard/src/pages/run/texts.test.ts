import { expect, it } from "vitest";
import openapi from "../../../openapi.json";
import { memoryText } from "./memory-text";
import { divergenceText, LEVELS, ratioText, toneOf } from "./verdict";

const MB = 1e6;
const use = (peak: number, planned: number) => ({
  peak_memory_bytes: peak * MB,
  planned_peak_memory_bytes: planned * MB,
});

it("names the phase of the peak, and says what the plan leaves out where more was measured", () => {
  const more = memoryText({ ...use(950, 600), memory_by_phase: { quantize: use(500, 600), verify: use(950, 528) } });
  expect(more.text).toBe("950 MB in verify, planned 528 MB (+80 %)");
  expect(more.why).toContain("mapped");
  const less = memoryText({ ...use(500, 600), memory_by_phase: null });
  expect(less).toEqual({ text: "500 MB, planned 600 MB (−17 %)", why: "" });
});

it("gives the intervals of a verdict", () => {
  expect(divergenceText({ kl_mean: 0.05, kl_stderr: 0.01 })).toBe("KL divergence 0.05, 95 % interval 0.0304 to 0.0696");
  expect(divergenceText({ kl_mean: 0.05, kl_stderr: null })).toBe("KL divergence 0.05");
  expect(divergenceText({ kl_mean: null })).toBe("");
  expect(ratioText({ value: 1.004, stderr: 0.001 })).toBe("Perplexity +0.40 %, 95 % interval +0.20 % to +0.60 %");
  expect(ratioText({ value: 3.478, stderr: 0.147 })).toBe("Perplexity +248 %, 95 % interval +219 % to +277 %");
});

it("does not show a broken result as a good one", () => {
  expect(LEVELS).toEqual(openapi.components.schemas.Verdict.properties.level.enum);
  expect(LEVELS.map(toneOf)).toEqual(["good", "good", "warn", "warn", "bad"]);
});
