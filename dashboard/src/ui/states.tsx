import type { State } from "../api/types";

interface Look {
  icon: string;
  tone: "quiet" | "busy" | "good" | "bad" | "warn";
  text: string;
}

export const STATES: Record<State, Look> = {
  running: { icon: "▶", tone: "busy", text: "Running" },
  queued: { icon: "◷", tone: "quiet", text: "Queued" },
  retry_wait: { icon: "↻", tone: "warn", text: "Waiting to retry" },
  pausing: { icon: "‖", tone: "warn", text: "Pausing" },
  paused: { icon: "‖", tone: "warn", text: "Paused" },
  cancelling: { icon: "⊘", tone: "warn", text: "Cancelling" },
  succeeded: { icon: "✓", tone: "good", text: "Succeeded" },
  failed: { icon: "✕", tone: "bad", text: "Failed" },
  cancelled: { icon: "⊘", tone: "quiet", text: "Cancelled" },
};

export const STATE_ORDER = Object.keys(STATES) as State[];
export const FINAL_STATES: ReadonlySet<State> = new Set<State>(["succeeded", "failed", "cancelled"]);

export type Action = "cancel" | "pause" | "resume" | "retry" | "delete";

const WAITING: readonly Action[] = ["cancel", "pause"];

/** The actions that each state of a job allows: the table of docs/reference/job-states.md. */
export const ACTIONS: Record<State, readonly Action[]> = {
  queued: WAITING,
  running: WAITING,
  retry_wait: WAITING,
  pausing: ["cancel"],
  paused: ["resume", "cancel"],
  cancelling: [],
  succeeded: ["delete"],
  failed: ["retry", "delete"],
  cancelled: ["retry", "delete"],
};

export function StateLabel({ state }: { state: State }) {
  const { icon, tone, text } = STATES[state];
  return (
    <span className={`state ${tone}`}>
      <span aria-hidden="true">{icon}</span> {text}
    </span>
  );
}
