// What runs, models and recipes are called in text.
import { type Goal, type Job, modelOf, type Recipe, type Runtime } from "./api/types";
import { capitalize, formatBytes, formatDuration, formatShare, shortId, shortName } from "./format";
import { RUNTIME_TEXTS } from "./labels";

const IN_ARTIFACT = /\/(job_[0-9a-f]{32})\/[0-9a-f]{64}(\/.*)?$/;

/** A model's name in short: the last part of its path or id, or the run whose artifact it lies in. */
export function modelText(name: string): string {
  const [, id, rest = ""] = IN_ARTIFACT.exec(name) ?? [];
  return id ? `${shortId(id)}${rest}` : shortName(name);
}

/** "w4a16 + gptq", "mix of w4a16, keep", "goal: vLLM on 24GB": what a result was made with. */
export function recipeText({ preset, mix, goal, algorithms }: Recipe): string {
  if (goal) return `goal: ${RUNTIME_TEXTS[goal.runtime as Runtime] ?? goal.runtime} on ${goal.device}`;
  const schemes = mix?.schemes as string[] | undefined;
  return [schemes ? `mix of ${schemes.join(", ")}` : (preset ?? "custom"), ...(algorithms ?? [])].join(" + ");
}

/** "At least 98 % recovery in vLLM on 24GB, context of 8192 tokens": what a search for a goal looks for. */
export function goalText({ min_recovery: least, max_size, max_time_s, runtime, device, context }: Goal): string {
  const parts = [
    least === "best" ? "The best recovery" : `At least ${formatShare(Number(least ?? 0.98), 1)} recovery`,
    `in ${RUNTIME_TEXTS[runtime]} on ${device}`,
  ];
  const limits = [
    context ? `context of ${context} tokens` : "",
    max_size ? `at most ${typeof max_size === "number" ? formatBytes(max_size) : max_size}` : "",
    max_time_s ? `searched for at most ${formatDuration(max_time_s)}` : "",
  ].filter(Boolean);
  return [parts.join(" "), ...limits].join(", ");
}

/** "16 w4a16, 5 int8_weight_only": the number of layers in each scheme. */
export const layersText = (layers: Record<string, number>) =>
  Object.entries(layers)
    .map(([scheme, number]) => `${number} ${scheme}`)
    .join(", ");

/** Where a scheduler runs an attempt, or why it waits: "slurm job 12: PENDING (Resources)". */
export function allocationText({ launcher, id, state, reason, nodes }: NonNullable<Job["allocation"]>): string {
  const name = capitalize(launcher);
  if (state === "AWAY") return `${name} does not answer`;
  return `${name} job ${id}: ${state}${reason ? ` (${reason})` : nodes && ` on ${nodes}`}`;
}

export function recipeOf({ preset, mix, goal, config }: Job): Recipe {
  const algorithms = (config.algo_config as { name: string }[] | undefined)?.map(({ name }) => name) ?? [];
  return { preset, mix, goal: (goal as Recipe["goal"] | undefined) ?? null, algorithms };
}

/** The name of a run. One without a name is called after its model and its recipe. */
export const nameOf = (job: Job) => job.name ?? `${modelText(modelOf(job))} ${recipeText(recipeOf(job))}`;
