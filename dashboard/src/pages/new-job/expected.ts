// What is known of a job before it runs: the result of an earlier one, the time, the algorithms.
import type { ModelResult, Plan } from "../../api/types";
import { formatDuration } from "../../format";
import { type Body, presetOf } from "./body";

/** The newest of a model's results that was made with the same preset, or for the same runtime and device. */
export function knownResult({ goal, mix, config }: Body, results: ModelResult[]): ModelResult | undefined {
  const preset = presetOf({ config } as Body);
  const isSame = ({ recipe }: ModelResult) =>
    goal
      ? recipe.goal?.runtime === goal.runtime && recipe.goal?.device === goal.device
      : !mix && preset !== null && recipe.preset === preset;
  return results.find((result) => result.verdict && isSame(result));
}

/** The time of earlier runs of the same kind; a rough one of those with the same model and preset alone. */
export function expectedTime({ time_s, rough_time_s }: Pick<Plan, "time_s" | "rough_time_s">): string {
  if (time_s !== null) return `about ${formatDuration(time_s)}, as earlier runs of this model with these settings`;
  if (rough_time_s != null)
    return `about ${formatDuration(rough_time_s)}, roughly: as earlier runs of this model and preset with other settings`;
  return "not known: no earlier run of this model with this preset";
}

/** Whether a job calibrates. The plan of a goal is its upper bound; a candidate may need it all the same. */
export function calibrationText(plan: Pick<Plan, "needs_calibration" | "executor" | "possible_chains">): string {
  if (plan.needs_calibration) return "required";
  if (plan.executor === "file_to_file") return "not used";
  const mayCalibrate = plan.possible_chains?.some((names) => names.length > 0);
  return mayCalibrate ? "if a chosen scheme needs it" : "evaluation only";
}

/** The algorithms of a job, or those that the first candidate of a goal can have. */
export function algorithmsText({ config, possible_chains }: Pick<Plan, "config" | "possible_chains">): string {
  const chainText = (names: string[]) => names.join(", ") || "none (rounds to nearest)";
  if (!possible_chains) return chainText(((config.algo_config ?? []) as { name: string }[]).map(({ name }) => name));
  const texts = possible_chains.map(chainText);
  return `${texts.join(" or ")} for the first candidate${texts.length > 1 ? ", depending on its schemes" : ""}`;
}
