import { expect, it } from "vitest";
import type { ModelResult, Recipe } from "../../api/types";
import { byVerdict, measured } from "./results";

const RECIPE: Recipe = { preset: null, mix: null, goal: null, algorithms: [] };

const result = (fields: Partial<ModelResult>): ModelResult => ({
  job_id: "job_01a200dc5edf7cfaa251b183f95c582d",
  name: null,
  finished_at: "2026-11-22T08:00:00Z",
  recipe: { ...RECIPE, preset: "fp8" },
  sha: null,
  export: ["quark"],
  size_before_bytes: 200,
  size_after_bytes: 100,
  verdict: "good",
  kl_mean: 0.05,
  kl_stderr: 0.001,
  perplexity_ratio: 1.01,
  cloned_from: null,
  publication: null,
  derived_models: [],
  ...fields,
});

it("charts only what was measured, with its error", () => {
  const points = measured([
    result({ name: "one" }),
    result({ kl_mean: null }),
    result({ size_after_bytes: null }),
    result({ kl_mean: 0, kl_stderr: null, verdict: null }),
  ]);
  expect(points.map(({ name, bytes, loss, stderr, level }) => [name, bytes, loss, stderr, level])).toEqual([
    ["one (job_…5c582d)", 100, 0.05, 0.001, "good"],
    ["fp8 (job_…5c582d)", 100, 0, undefined, "no verdict"],
  ]);
});

it("draws bars of 95 %, as all other charts do", () => {
  const [series] = byVerdict(measured([result({ kl_stderr: 0.001 })]));
  expect(series?.points[0]?.error).toBeCloseTo(0.00196, 6);
});

it("gives each verdict a series, the best first, and always the same look", () => {
  const series = byVerdict(
    measured([
      result({ verdict: "broken" }),
      result({ verdict: null }),
      result({ verdict: "faithful" }),
      result({ verdict: "broken" }),
    ]),
  );
  expect(series.map(({ name, look, points }) => [name, look, points.length])).toEqual([
    ["faithful", 0, 1],
    ["broken", 4, 2],
    ["no verdict", 5, 1],
  ]);
});
