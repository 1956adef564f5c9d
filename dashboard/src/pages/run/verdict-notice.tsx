import type { Job, Verdict } from "../../api/types";
import { capitalize } from "../../format";
import { Link } from "../../link";
import { useSession } from "../../sign-in";
import { Code } from "../../ui/basics";
import { VerdictLevel } from "../job-progress";
import { type Changes, searchOf } from "../new-job/steps";
import { toneOf } from "./verdict";

/** The verdict in words, its level, what it was judged by, and what to try next. */
export function VerdictNotice({ job, verdict, figures = "" }: { job: Job; verdict: Verdict; figures?: string }) {
  const { level, reason, sentence, advice, steps = [] } = verdict;
  return (
    <div className={`notice ${toneOf(level)}`}>
      <h2>{sentence ?? <VerdictLevel level={level} />}</h2>
      {sentence && (
        <p>
          Verdict: <VerdictLevel level={level} />
        </p>
      )}
      {figures && <p>{figures}</p>}
      <p>
        {capitalize(reason)}
        {advice && steps.length === 0 && `. ${advice}`}
      </p>
      {steps.map((step) => (
        <NextStep key={step.text} job={job} step={step} search={searchOf(step.changes)} />
      ))}
    </div>
  );
}

interface StepProps {
  job: Job;
  step: NonNullable<Verdict["steps"]>[number];
  /** The parameters of the form's address that stand for the changes. */
  search: Changes;
}

/** Something to try: as a form that is filled in, and as a command. */
export function NextStep({ job, step: { text, flags }, search }: StepProps) {
  const mayWrite = useSession().can("jobs:write");
  return (
    <div className="row">
      <span>{text}</span>
      {mayWrite && (
        <Link
          to="/jobs/new"
          search={{ from: job.id, ...search }}
          className="button small"
          aria-label={`Run again: ${text}`}
        >
          Run again
        </Link>
      )}
      <details>
        <summary>Command</summary>
        <Code text={`bitfoundry clone ${job.id} ${flags}`} label={`Command: ${text}`} />
      </details>
    </div>
  );
}
