// The results of a model as text and as points of a chart.
import type { ModelResult } from "../../api/types";
import type { Series } from "../../charts/scatter";
import { shortId } from "../../format";
import { recipeText } from "../../names";
import { halfInterval } from "../compare/change";
import type { Result } from "../compare/pareto";
import { LEVELS } from "../run/verdict";

const UNJUDGED = "no verdict";

/** The results whose size and divergence were measured. */
export function measured(results: ModelResult[]): (Result & { level: string })[] {
  return results.flatMap((result) => {
    const { job_id: id, size_after_bytes: bytes, kl_mean: loss, kl_stderr: stderr } = result;
    if (bytes == null || loss == null) return [];
    const name = `${result.name ?? recipeText(result.recipe)} (${shortId(id)})`;
    return [{ id, name, bytes, loss, stderr: stderr ?? undefined, level: result.verdict ?? UNJUDGED }];
  });
}

/** A series for each verdict that a result has, the best first. The look of a verdict is always the same. */
export function byVerdict(results: (Result & { level: string })[]): Series[] {
  return [...LEVELS, UNJUDGED].flatMap((level, look) => {
    const points = results
      .filter((result) => result.level === level)
      .map(({ name, bytes, loss, stderr }) => ({ x: bytes, y: loss, name, error: halfInterval(stderr) }));
    return points.length ? [{ name: level, look, points }] : [];
  });
}
