import { type Job, type Progress, summaryOf } from "../api/types";
import { formatBytes, formatDuration, formatEstimate, formatLoss, formatPercent } from "../format";
import { OPERATOR } from "../labels";
import { Link } from "../link";
import { allocationText, nameOf } from "../names";
import { Bar, Time } from "../ui/basics";
import { StateLabel } from "../ui/states";
import { toneOf } from "./run/verdict";

/** The progress of the current phase as text, for example "block 12 of 30". */
export function formatProgress({ unit, done, total }: Pick<Progress, "unit" | "done" | "total">): string {
  return unit === "byte" ? `${formatBytes(done)} of ${formatBytes(total)}` : `${unit} ${done} of ${total}`;
}

/** "40 s left in quantize": the engine's estimate, of its present phase alone. Empty where it has none. */
export const phaseLeftText = ({ eta_s, phase }: Progress) => (eta_s ? `${formatDuration(eta_s)} left in ${phase}` : "");

/** "about 6 min left": of the whole job. Empty without similar runs to estimate from; never below the phase's rest. */
export const jobLeftText = ({ eta_s }: Pick<Job, "eta_s">, progress: Progress | null) =>
  eta_s === null ? "" : `${formatEstimate(Math.max(eta_s, progress?.eta_s ?? 0))} left`;

/** The progress cell of a list: phase, bar and remaining time, or the reason why the job waits or failed. */
export function JobProgress({ job }: { job: Job }) {
  const progress = job.progress;
  if (job.state === "running" || job.state === "pausing" || job.state === "cancelling") {
    const shown = progress && progress.phase === job.phase ? progress : null;
    const phaseLeft = shown ? phaseLeftText(shown) : "";
    const left = jobLeftText(job, shown) || phaseLeft;
    return (
      <div>
        <Bar done={shown?.done ?? 0} total={shown?.total ?? 1} label={`${nameOf(job)}: ${job.phase ?? "starting"}`} />
        <div className="sub" title={phaseLeft || undefined}>
          {job.phase ?? (job.allocation ? allocationText(job.allocation) : "starting")}
          {shown && ` · ${formatProgress(shown)}`}
          {left && ` · ${left}`}
        </div>
      </div>
    );
  }
  if (job.waiting_reason) {
    return (
      <div className="sub">
        {job.queue_position ? `#${job.queue_position} in queue · ` : ""}
        {job.waiting_reason.replaceAll("_", " ")}
      </div>
    );
  }
  if (job.error) {
    const message = String(job.error.message ?? job.error.code);
    return (
      <div className="sub clip error" title={message}>
        {message}
      </div>
    );
  }
  const seconds = summaryOf(job)?.total_s;
  return <div className="sub">{seconds ? `took ${formatDuration(seconds)}` : ""}</div>;
}

/** The name of a run in a list, which opens it. */
export function RunLink({ job }: { job: Job }) {
  return (
    <div>
      <Link to="/jobs/$id" params={{ id: job.id }} title={job.id}>
        {nameOf(job)}
      </Link>
    </div>
  );
}

/** The cells of a list for the state of a run and its progress. */
export function StateCells({ job }: { job: Job }) {
  return (
    <>
      <td data-label="State">
        <StateLabel state={job.state} />
      </td>
      <td className="progress">
        <JobProgress job={job} />
      </td>
    </>
  );
}

/** The cells of a list for who submitted a run, and when. */
export function OriginCells({ job }: { job: Job }) {
  return (
    <>
      <td data-label="Owner">{job.submitted_by?.name ?? OPERATOR}</td>
      <td className="nowrap" data-label="Created">
        <Time at={job.created_at} />
      </td>
    </>
  );
}

export function SizeChange({ job }: { job: Job }) {
  const summary = summaryOf(job);
  if (!summary) return <>–</>;
  const { size_before_bytes: before, size_after_bytes: after } = summary;
  return (
    <>
      {formatBytes(before)} → {formatBytes(after)}
      <div className="sub">{formatPercent(after / before - 1, 0)}</div>
    </>
  );
}

/** The level of a result, marked by a sign and a word, not by colour alone. */
export function VerdictLevel({ level }: { level: string }) {
  const isFine = toneOf(level) === "good";
  const isUnclear = level === "unclear"; // not enough text: neither good nor bad
  return (
    <strong className={isFine || isUnclear ? "nowrap" : "nowrap error"}>
      {isFine ? "✓" : isUnclear ? "?" : "✕"} {level}
    </strong>
  );
}

/** The verdict on the result of a run, and whether it missed its goal. "–" for a run without a result. */
export function VerdictText({ job }: { job: Job }) {
  const summary = summaryOf(job);
  if (!summary) return <>–</>;
  return (
    <>
      {summary.verdict ? <VerdictLevel level={summary.verdict.level} /> : "not measured"}
      {summary.goal && !summary.goal.is_met && <div className="error nowrap">goal missed</div>}
    </>
  );
}

export function PerplexityChange({ job }: { job: Job }) {
  const summary = summaryOf(job);
  if (summary?.perplexity_before == null || summary.perplexity_after == null) return <>–</>;
  const digits = summary.perplexity_before >= 100 ? 0 : 2;
  return (
    <>
      {summary.perplexity_before.toFixed(digits)} → {summary.perplexity_after.toFixed(digits)}
      {summary.perplexity_ratio !== null && <div className="sub">{formatLoss(summary.perplexity_ratio - 1)}</div>}
    </>
  );
}
