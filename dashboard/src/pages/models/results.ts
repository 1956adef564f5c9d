// The results of a model as text and as points of a chart.
import type { ModelResult, Recipe } from "../../api/types";
import type { Series } from "../../charts/scatter";
import { shortId, shortName } from "../../format";
import { RUNTIME_TEXTS } from "../../labels";
import type { Result } from "../compare/pareto";

export const LEVELS = ["faithful", "good", "degraded", "broken"];
const UNJUDGED = "no verdict";

/** The page of one model: a name may be a path, so it is a parameter. */
export const modelAddress = (name: string) => `/models?model=${encodeURIComponent(name)}`;

const IN_ARTIFACT = /\/(job_[0-9a-f]{32})\/[0-9a-f]{64}(\/.*)?$/;

/** A model's name in short: the last part of its path or id, or the run whose artifact it lies in. */
export function modelText(name: string): string {
  const [, id, rest = ""] = IN_ARTIFACT.exec(name) ?? [];
  return id ? `${shortId(id)}${rest}` : shortName(name);
}

/** "w4a16 + gptq", "mix of w4a16, keep", "goal: vLLM on 24GB": what a result was made with. */
export function recipeText({ preset, mix, goal, algorithms }: Recipe): string {
  if (goal) return `goal: ${RUNTIME_TEXTS[String(goal.runtime)] ?? goal.runtime} on ${goal.device}`;
  const schemes = mix?.schemes as string[] | undefined;
  return [schemes ? `mix of ${schemes.join(", ")}` : (preset ?? "custom"), ...(algorithms ?? [])].join(" + ");
}

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
      .map(({ name, bytes, loss, stderr }) => ({ x: bytes, y: loss, name, error: stderr }));
    return points.length ? [{ name: level, look, points }] : [];
  });
}
