// The phases of a run as a timeline, and what they say about a run that goes on or has failed.
import type { Job, Progress } from "../../api/types";
import { formatDuration, formatTime } from "../../format";
import { FINAL_STATES } from "../../ui/states";
import { formatProgress, phaseLeftText } from "../job-progress";
import type { Saved } from "./event-log";

export interface Step {
  name: string;
  state: "done" | "running" | "stopped" | "coming";
  /** Seconds in this phase, all its rounds together; 0 for one that is still to come. */
  seconds: number;
  rounds: number;
}

/** What each phase of the engine does. */
export const PHASE_TEXTS: Record<string, string> = {
  resolve: "Find the model",
  download: "Download the model from the Hub",
  plan: "Choose the scheme of each layer, and estimate size and memory",
  sensitivity: "Measure the loss of each layer with each scheme",
  trial: "Quantize and measure a candidate",
  gradients: "Determine which tokens and outputs the predictions depend on",
  quantize: "Quantize block by block",
  export: "Write the files",
  verify: "Read the files back and measure the result",
};

type Phased = Pick<Job, "state" | "phases"> & { goal?: unknown; mix?: unknown; config?: unknown };

/** The phases so far, one step for each name, then those that a job which has not ended will still enter. */
export function timeline(job: Phased, now: number): Step[] {
  const steps = new Map<string, Step>();
  for (const { name, state, started_at: start, ended_at: end } of job.phases) {
    const before = steps.get(name) ?? { seconds: 0, rounds: 0 };
    const seconds = before.seconds + ((end ? Date.parse(end) : now) - Date.parse(start)) / 1000;
    steps.set(name, { name, state, seconds, rounds: before.rounds + 1 });
  }
  const coming = comingPhases(job).map((name): Step => ({ name, state: "coming", seconds: 0, rounds: 0 }));
  return [...steps.values(), ...coming];
}

/** The phases after the present one. A search for a goal repeats them, and nobody knows how often. */
function comingPhases({ state, phases, goal, mix, config }: Phased): string[] {
  if (goal || state === "cancelling" || FINAL_STATES.has(state)) return [];
  const { algo_config: algorithms = [] } = (config ?? {}) as { algo_config?: { name: string }[] };
  const first = [
    ...(mix ? ["sensitivity"] : []),
    ...(algorithms.some(({ name }) => name === "yaqa") ? ["gradients"] : []),
  ];
  const after = algorithms.some(({ name }) => name === "distill") ? ["distill"] : [];
  const order = ["resolve", "plan", ...first, "quantize", ...after, "export", "verify"];
  const entered = new Set(phases.map((phase) => phase.name));
  const last = order.findLastIndex((name) => entered.has(name));
  return order.slice(last + 1);
}

/** "block 3 of 30 · 40 s left in quantize, then export and verify" */
export function remainingText(progress: Progress, steps: Step[]): string {
  const next = steps.filter(({ state }) => state === "coming").map(({ name }) => name);
  const then = next.length ? `then ${listed(next)}` : "";
  return [formatProgress(progress), [phaseLeftText(progress), then].filter(Boolean).join(", ")]
    .filter(Boolean)
    .join(" · ");
}

const listed = (names: string[]) =>
  names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names.join();

/** Where a run has failed: "Failed in quantize, at block 3 of 30, after 4 s". */
export function failedText(job: Phased): string {
  const phase = job.phases.at(-1);
  if (!phase) return "Failed before its first phase";
  const { name, done, total, unit, started_at: start, ended_at: end } = phase;
  const at = done != null && total != null && unit ? `, at ${formatProgress({ done, total, unit })}` : "";
  const after = end ? `, after ${formatDuration((Date.parse(end) - Date.parse(start)) / 1000)}` : "";
  return `Failed in ${name}${at}${after}`;
}

type Stopped = Pick<Job, "state" | "attempt"> & { goal?: unknown; progress_kept_until?: string | null };

/** What a retry of a failed run would do: "Resume after block 12 of 30", or empty if it starts from the beginning. */
export function resumesText({ progress_kept_until: until, goal }: Stopped, saved: Saved | null, now: number): string {
  if (!until || Date.parse(until) < now || !(saved || goal)) return "";
  return goal || !saved ? "Resume" : `Resume after block ${saved.next_block} of ${saved.num_blocks}`;
}

/** Where a stopped run goes on: "It continues after block 12 of 30, ...". Empty for a run that does not stand still. */
export function continuesText(job: Stopped, saved: Saved | null, now: number): string {
  const { state, attempt, goal } = job;
  const elsewhere = "on a worker with the same disk; on any other, it starts from the beginning.";
  if (state === "failed" || state === "cancelled") {
    const until = job.progress_kept_until;
    if (until && resumesText(job, saved, now))
      return `Saved progress is kept until ${formatTime(until)}. Until then, a retry continues from it, ${elsewhere}`;
    return "A retry starts from the beginning: no progress of this run is kept. Any worker with enough memory can run it.";
  }
  if (attempt === 0 || !["paused", "queued", "retry_wait"].includes(state)) return "";
  if (goal) return `It continues where it stopped, ${elsewhere}`;
  if (!saved) return "It starts from the beginning: no block was saved.";
  return `It continues after block ${saved.next_block} of ${saved.num_blocks}, ${elsewhere}`;
}

/** The code of a run that was stopped at its time limit. */
export const OUT_OF_TIME = "max_runtime_exceeded";

/** What a retry would do. One that begins anew within the same time limit ends at it again. */
export function adviceText({ state, error }: Pick<Job, "state" | "error">, resumes: string): string {
  if (state !== "failed") return "the job continues automatically";
  if (!error?.retryable) return "it will fail again unless something changes";
  if (error.code !== OUT_OF_TIME) return "a retry may help";
  return resumes
    ? "a retry has as much time again, and continues from the saved progress"
    : "a retry starts from the beginning and has no more time: clone it with a larger run timeout";
}
