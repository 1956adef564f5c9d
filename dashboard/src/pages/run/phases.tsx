import { useEffect, useState } from "react";
import type { Job } from "../../api/types";
import { capitalize, formatDuration } from "../../format";
import { allocationText } from "../../names";
import { Bar } from "../../ui/basics";
import { FINAL_STATES } from "../../ui/states";
import { jobLeftText } from "../job-progress";
import type { EventLog } from "./event-log";
import { continuesText, PHASE_TEXTS, remainingText, type Step, timeline } from "./timeline";

const SIGNS = { done: "✓", running: "▶", stopped: "✕ stopped", coming: "○" };
const NARROWEST = 0.04;

/** The phases of the current attempt, as wide as they took long, and the progress of the present one. */
export function Phases({ job, eventLog }: { job: Job; eventLog: EventLog }) {
  const isOver = FINAL_STATES.has(job.state);
  const now = useNow(!isOver && job.phases.length > 0);
  const progress = eventLog.progress ?? job.progress; // events arrive before the job is polled
  const steps = timeline(job, now);
  const present = progress?.phase === job.phase ? progress : null;
  const left = isOver ? "" : jobLeftText(job, present);
  const continues = continuesText(job, eventLog.saved, now);
  const total = steps.reduce((sum, { seconds }) => sum + seconds, 0);
  return (
    <section className="card" aria-label="Phases">
      {job.phases.length === 0 && <p className="faint">{waitingText(job)}</p>}
      {(job.phases.length > 0 || !isOver) && (
        <ol className="phases">
          {steps.map((step) => (
            <PhaseStep key={step.name} step={step} share={total ? step.seconds / total : 0} />
          ))}
        </ol>
      )}
      {!isOver && job.phase && present && (
        <Bar done={present.done} total={present.total} label={`Progress of ${present.phase}`} />
      )}
      {left && (
        <p title="Estimated from earlier runs of this project with the same algorithms and measurements">
          <strong>{capitalize(left)}</strong>
        </p>
      )}
      {!isOver && job.phase && job.allocation && <p className="sub">{allocationText(job.allocation)}</p>}
      {!isOver && job.phase && present && <p className="sub">{remainingText(present, steps)}</p>}
      {continues && <p className="sub">{continues}</p>}
      {job.phases.length > 0 && (
        <p className="sub">
          {formatDuration(total)} in all phases{!isOver && " so far"}
        </p>
      )}
    </section>
  );
}

function PhaseStep({ step: { name, state, seconds, rounds }, share }: { step: Step; share: number }) {
  return (
    <li className={state} style={{ flexGrow: 100 * Math.max(NARROWEST, share) }} title={PHASE_TEXTS[name]}>
      <strong>{name}</strong>{" "}
      <span className="sub nowrap">
        {SIGNS[state]} {state === "coming" ? "to come" : formatDuration(seconds)}
        {rounds > 1 && ` in ${rounds} rounds`}
      </span>
    </li>
  );
}

function waitingText(job: Job): string {
  if (job.waiting_reason)
    return `Waiting: ${job.waiting_reason.replaceAll("_", " ")}${job.queue_position ? `, #${job.queue_position} in queue` : ""}.`;
  if (job.allocation && !FINAL_STATES.has(job.state)) return `${allocationText(job.allocation)}.`;
  return FINAL_STATES.has(job.state) ? "The run ended before its first phase." : "Starting…";
}

function useNow(isTicking: boolean): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    if (!isTicking) return;
    const timer = window.setInterval(() => setNow(Date.now()), 1000);
    return () => window.clearInterval(timer);
  }, [isTicking]);
  return now;
}
