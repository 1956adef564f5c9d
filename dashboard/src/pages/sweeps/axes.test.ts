import { expect, it } from "vitest";
import { axesText, axisNames, countsText, valueText } from "./axes";

it("names axes by the last part of their pointers, unless two end alike", () => {
  const matrix = { "/config/preset": ["fp8", "w4a16"], "/calibration/seq_len": [1], "/evaluation/seq_len": [1, 2, 3] };
  expect([...axisNames(matrix).values()]).toEqual(["preset", "/calibration/seq_len", "/evaluation/seq_len"]);
  expect(axesText({ "/config/preset": ["fp8", "w4a16"], "/calibration/num_samples": [8] })).toBe(
    "preset (2) × num_samples (1)",
  );
});

it("shows values as they were asked for, and counts by state", () => {
  const job = { sweep_values: { "/config": { preset: "fp8" }, "/effort": "best" } };
  expect([valueText(job, "/config"), valueText(job, "/effort"), valueText(job, "/gate")]).toEqual([
    '{"preset":"fp8"}',
    "best",
    "–",
  ]);
  expect(countsText({ succeeded: 2, running: 1, failed: 0 })).toBe("1 running, 2 succeeded");
});
