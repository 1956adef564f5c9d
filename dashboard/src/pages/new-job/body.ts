// The request for a job, shared by the form, the JSON tab, the plan and the code snippets.
import type { Job, JobCreate, Preset } from "../../api/types";
import { differences } from "../../diff";

export type Body = JobCreate;
export type ModelRef = Body["model"];
export type Calibration = NonNullable<Body["calibration"]>;
export type Evaluation = NonNullable<Body["evaluation"]>;
export type Mix = NonNullable<Body["mix"]>;
export type Goal = NonNullable<Body["goal"]>;
export type Effort = NonNullable<Body["effort"]>;
const EFFORTS: Effort[] = ["balanced", "fast", "best"];

/** The effort of a job with a preset and no algorithms of its own. */
export const effortOf = (body: Body) => body.effort ?? "balanced";

export const START_GOAL: Goal = { runtime: "vllm", device: "24GB" };
export const START_SCHEME = { config: { preset: "w4a16" } };

/** The fields of the section "More settings". */
const MORE_FIELDS = [
  "calibration",
  "evaluation",
  "gate",
  "publish",
  "name",
  "labels",
  "priority",
  "limits",
  "max_shard_size",
] as const satisfies (keyof Body)[];

/** Whether the request sets something in the section "More settings". */
export const setsMore = (body: Body) =>
  chainOf(body) !== undefined || MORE_FIELDS.some((name) => body[name] !== undefined);

/** Whether a pointer into the request leads into the section "More settings". */
export const isInMore = (pointer: string) =>
  pointer.startsWith("/config/algo_config") || MORE_FIELDS.some((name) => pointer.split("/")[1] === name);

/** `body` with `value` at the pointer. Empty values are left out: the service fills in its defaults. */
export function withValue(body: Body, pointer: string, value: unknown): Body {
  const set = (target: unknown, [name, ...rest]: string[]): unknown => {
    if (name === undefined) return value;
    const copy: Record<string, unknown> = { ...(target as Record<string, unknown> | undefined) };
    const member = set(copy[name], rest);
    if (
      member === undefined ||
      member === "" ||
      (typeof member === "object" && member !== null && !Array.isArray(member) && Object.keys(member).length === 0)
    )
      delete copy[name];
    else copy[name] = member;
    return copy;
  };
  return set(body, pointer.split("/").slice(1).map(unescapePointer)) as Body;
}

export const valueAt = (body: Body, pointer: string) =>
  pointer
    .split("/")
    .slice(1)
    .map(unescapePointer)
    .reduce<unknown>((at, name) => (at as Record<string, unknown> | undefined)?.[name], body);

const SOURCE_FIELDS = ["source", "sources", "column", "config", "split", "revision", "chat_template_kwargs", "stride"];

/** Another source; the settings that belong to the previous one are dropped. */
export function withSource(body: Body, of: "calibration" | "evaluation", source: string): Body {
  const kept = Object.entries(body[of] ?? {}).filter(([name]) => !SOURCE_FIELDS.includes(name));
  return withValue(body, `/${of}`, { ...Object.fromEntries(kept), ...(source ? { source } : {}) });
}

const unescapePointer = (part: string) => part.replaceAll("~1", "/").replaceAll("~0", "~");

export const presetOf = (body: Body) => (typeof body.config?.preset === "string" ? body.config.preset : null);

/** Whether the config is an unchanged preset. */
export const isPlainPreset = (body: Body) => presetOf(body) !== null && Object.keys(body.config ?? {}).length === 1;

/** An algorithm with the options that are set. */
export interface Algorithm extends Record<string, unknown> {
  name: string;
}

/** The algorithms that the request itself names, if it does. */
export const chainOf = (body: Body) => body.config?.algo_config as Algorithm[] | undefined;

/** Name the algorithms, in place of an effort; without a chain they are left to the service. */
export function withChain(body: Body, chain: Algorithm[] | undefined): Body {
  const { algo_config: _, ...config } = body.config ?? {};
  if (chain) {
    const { effort: __, ...rest } = body;
    return { ...rest, config: { ...config, algo_config: chain } };
  }
  return withValue(body, "/config", config);
}

/** The initial value of each kind of budget. */
export const BUDGETS = { max_size: "90MB", max_bits: 5, max_divergence: 0.02 } as const;
export type Budget = keyof typeof BUDGETS;
export const START_MIX: Mix = { schemes: ["w4a16", "int8_weight_only"], max_bits: BUDGETS.max_bits };

/** Switch to a goal, which chooses everything about the scheme. */
export function withGoal({ config: _, mix: __, effort: ___, export: ____, file2file: _____, ...rest }: Body): Body {
  return { ...rest, goal: START_GOAL };
}

/** The value of `min_recovery` for a choice of the form. */
export const recoveryOf = (text: string) => (text === "" ? undefined : text === "best" ? text : Number(text));

/** Switch to mixed precision, keeping the algorithms of the config, or back to the default config without a mix. */
export function withMix({ config, mix: _, goal: __, ...rest }: Body, mix: Mix | undefined): Body {
  if (!mix) return { ...rest, config: START_SCHEME.config };
  const algorithms = config?.algo_config ? { config: { algo_config: config.algo_config } } : {};
  return { ...rest, ...algorithms, mix };
}

/** The mix with this budget only: exactly one of the three is set. */
export const withBudget = ({ schemes }: Mix, name: Budget): Mix => ({ schemes, [name]: BUDGETS[name] });
export const budgetOf = (mix: Mix) => (Object.keys(BUDGETS) as Budget[]).find((name) => mix[name] !== undefined);

/** Switch to another preset. Exports that cannot hold it are dropped; with none, the service chooses for the preset. */
export function withPreset({ export: chosen = [], ...body }: Body, preset: Preset): Body {
  const kept = chosen.filter((name) => preset.exports.includes(name));
  return { ...body, config: { preset: preset.name }, ...(kept.length ? { export: kept } : {}) };
}

/** The whole config that a preset stands for with the algorithms of an effort. */
export const configOf = (preset: Preset, effort: Effort) => ({
  ...preset.config,
  algo_config: preset.recipes[effort],
});

/** The effort whose algorithms a config has; undefined if it names others. */
export const effortOfConfig = (preset: Preset, config: Record<string, unknown>) =>
  EFFORTS.find((each) => differences(preset.recipes[each], config.algo_config ?? []).length === 0);

/** The config of a preset as it was asked for: with the algorithms of the config's effort, if it has those of one. */
export function presetConfigFor(preset: Preset, config: Record<string, unknown>) {
  const effort = effortOfConfig(preset, config);
  return effort ? configOf(preset, effort) : preset.config;
}

/** The request that clones a job. An unchanged preset is given by name; the publish target is not copied. */
export function bodyOf(job: Job, presets: Preset[]): Body {
  const preset = presets.find((each) => each.name === job.preset || each.aliases.includes(job.preset ?? ""));
  const isPreset = preset && differences(presetConfigFor(preset, job.config), job.config).length === 0;
  const effort = isPreset ? effortOfConfig(preset, job.config) : undefined;
  const { sha, ...model } = job.model as ModelRef & { sha?: string };
  if (sha) model.revision = sha;
  const limits = Object.fromEntries(Object.entries(job.limits).filter(([, value]) => value !== null));
  const { tasks, ...measured } = job.evaluation as Evaluation;
  const evaluation = { ...measured, ...(tasks?.length ? { tasks } : {}) };
  const { algo_config: algorithms } = job.config as { algo_config?: unknown[] };
  const besideMix = algorithms?.length ? { config: { algo_config: algorithms } } : {};
  const goal = Object.fromEntries(Object.entries(job.goal ?? {}).filter(([, value]) => value !== null));
  return {
    model,
    ...(job.goal
      ? { goal: goal as Goal }
      : {
          ...(job.mix
            ? { ...besideMix, mix: job.mix as Mix }
            : { config: effort && preset ? { preset: preset.name } : job.config }),
          ...(effort && effort !== "balanced" && !job.mix ? { effort } : {}),
          export: job.export,
        }),
    calibration: job.calibration as Calibration,
    ...(job.name ? { name: job.name } : {}),
    ...(Object.keys(job.labels).length ? { labels: job.labels } : {}),
    priority: job.priority,
    ...(Object.keys(limits).length ? { limits } : {}),
    max_shard_size: job.max_shard_size,
    gate: job.gate,
    ...(Object.keys(evaluation).length ? { evaluation } : {}),
    ...(job.file2file ? { file2file: true } : {}),
    ...(job.shard_blocks === null ? {} : { shard_blocks: job.shard_blocks }),
  };
}

/** Labels as text, for example "team=search, tier=gold". */
export const labelsText = (labels: Record<string, string> = {}) =>
  Object.entries(labels)
    .map(([name, value]) => `${name}=${value}`)
    .join(", ");

export function readLabels(text: string): Record<string, string> {
  const pairs = text
    .split(",")
    .map((each) => each.trim())
    .filter(Boolean);
  return Object.fromEntries(
    pairs.map((pair) => [pair.split("=")[0]?.trim() ?? "", pair.split("=").slice(1).join("=").trim()]),
  );
}
