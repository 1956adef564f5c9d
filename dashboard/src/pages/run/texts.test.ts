import { expect, it } from "vitest";
import openapi from "../../../openapi.json";
import { checksText } from "./checks";
import { memoryText } from "./memory-text";
import { adviceText } from "./timeline";
import { divergenceText, LEVELS, measuredText, ratioText, toneOf } from "./verdict";

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
  expect(divergenceText({ kl_mean: 0.05, kl_stderr: 0.01 })).toBe("KL divergence between 0.03 and 0.07");
  expect(divergenceText({ kl_mean: 0.05, kl_stderr: null })).toBe("KL divergence 0.05");
  expect(divergenceText({ kl_mean: null })).toBe("");
  expect(ratioText({ value: 1.004, stderr: 0.001 })).toBe("Perplexity between +0.20 % and +0.60 %");
  expect(ratioText({ value: 3.478, stderr: 0.147 })).toBe("Perplexity between +219 % and +277 %");
});

it("rounds intervals outwards, as the reports do", () => {
  expect(measuredText({ value: 0.15364, stderr: 0.0265 }, 3)).toBe("0.154 (0.10 to 0.21)");
  expect(measuredText({ value: 12.3456789, stderr: 0.0512 }, 4)).toBe("12.35 (12.2 to 12.5)");
  expect(measuredText({ value: 0.001, stderr: 0.01 }, 3)).toBe("0.001 (0.00 to 0.03)");
  expect(measuredText({ value: 0.5, stderr: null }, 3)).toBe("0.5");
  expect(measuredText({ value: 3, stderr: 2 }, 5, true)).toBe("3 (1 to 12)");
  expect(measuredText({ value: 70, stderr: 60 }, 5, true)).toBe("70 (13 to 376)");
});

it("tells one story of a run that hit its time limit", () => {
  const job = (state: string, retryable = true) =>
    ({ state, error: { code: "max_runtime_exceeded", message: "", retryable } }) as never;
  expect(adviceText(job("failed"), "")).toContain("starts from the beginning and has no more time");
  expect(adviceText(job("failed"), "Resume after block 3 of 30")).toContain("continues from the saved progress");
  expect(adviceText(job("failed", false), "")).toContain("will fail again");
  expect(adviceText(job("retry_wait"), "")).toContain("continues automatically");
});

it("sorts checks into those that were missed and footnotes", () => {
  const gate = (status: string) => ({ status }) as never;
  expect(checksText([gate("pass"), gate("fail"), gate("pass")])).toBe("1 fail, 2 pass");
});

it("does not show a broken result as a good one", () => {
  expect(LEVELS).toEqual(openapi.components.schemas.Verdict.properties.level.enum);
  expect(LEVELS.map(toneOf)).toEqual(["good", "good", "warn", "warn", "bad"]);
});
