import { expect, it } from "vitest";
import { csvOf } from "./csv";
import { run } from "./samples";

const HOSTILE = '=HYPERLINK("http://x"),\nnext';

it("writes unrounded numbers, half intervals of 95 %, and nothing for what was not measured", () => {
  const jobs = [run("a"), run("b", { state: "failed" }, null)];
  const [heads, first, second] = csvOf(jobs, new Map([["job_a", "one"]]), new Set(["job_a"]))
    .split("\r\n")
    .map((line) => line.split(","));
  const cell = (line: string[] | undefined, name: string) => line?.[heads?.indexOf(name) ?? -1];
  expect(first?.slice(0, 4)).toEqual(["job_a", "one", "/models/tiny", "fp8"]);
  expect(Number(cell(first, "perplexity_change"))).toBeCloseTo(0.0063, 6);
  expect(Number(cell(first, "perplexity_change_half_interval_95"))).toBeCloseTo(0.00196, 6);
  expect(cell(first, "kl_mean_half_interval_95")).toBe("");
  expect([cell(first, "pareto_optimal"), cell(second, "pareto_optimal")]).toEqual(["yes", "no"]);
  expect([cell(second, "state"), cell(second, "size_bytes")]).toEqual(["failed", ""]);
  expect(second).toHaveLength(heads?.length ?? 0);
});

it("quotes names, and lets no spreadsheet run them", () => {
  const text = csvOf([run("a")], new Map([["job_a", HOSTILE]]), new Set());
  expect(text).toContain(`"'=HYPERLINK(""http://x""),\nnext"`);
});
