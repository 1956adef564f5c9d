import { useState } from "react";
import { get, post } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, List, Worker } from "../../api/types";
import { Link } from "../../link";
import { useSession } from "../../sign-in";
import { Failure } from "../../ui/basics";
import { ACTIONS } from "../../ui/states";
import { CheckTable } from "./checks";
import type { EventLog, Judged } from "./event-log";
import { Samples } from "./samples";
import { adviceText, failedText, OUT_OF_TIME, resumesText } from "./timeline";
import { VerdictNotice } from "./verdict-notice";

interface Props {
  job: Job;
  eventLog: EventLog;
  onChange: () => void;
}

/** What has failed, where and why, and what to do: each of it a button. A rejected result shows what it is like. */
export function JobFailure(props: Props) {
  const { job, eventLog } = props;
  const isRejected = job.state === "failed" && job.error?.code === "gate_failed" && eventLog.judged !== null;
  return isRejected && eventLog.judged ? <Rejected job={job} judged={eventLog.judged} /> : <Failed {...props} />;
}

/** A result that is complete, and missed a limit of a job that fails then. */
function Rejected({ job, judged: { results, verdict, samples } }: { job: Job; judged: Judged }) {
  const mayWrite = useSession().can("jobs:write");
  return (
    <section className="card" aria-label="Failure">
      <h2>The result did not pass its checks</h2>
      {verdict && <VerdictNotice job={job} verdict={verdict} />}
      <CheckTable gates={results.filter(({ status }) => status === "fail")} />
      {samples && <Samples samples={samples} />}
      {job.error?.detail && <p className="sub">{job.error.detail}</p>}
      <div className="actions">
        {mayWrite && (
          <>
            <Link to="/jobs/new" search={{ from: job.id, gate: "warn" }} className="button">
              Run again, with failed checks as warnings
            </Link>
            <Link to="/jobs/new" search={{ from: job.id }} className="button primary">
              Clone and change
            </Link>
          </>
        )}
      </div>
    </section>
  );
}

function Failed({ job, eventLog: { saved }, onChange }: Props) {
  const mayWrite = useSession().can("jobs:write");
  const [error, setError] = useState<Error>();
  const failure = job.error;
  const mayGoElsewhere = useMayGoElsewhere(failure?.retryable === true);
  if (!failure) return null;
  const isFinal = job.state === "failed";
  const resumes = resumesText(job, saved, Date.now());
  const isWorthRetrying = failure.retryable && (failure.code !== OUT_OF_TIME || resumes !== "");
  const retry = (query = "") => post(`/v1/jobs/${job.id}/retry${query}`).then(onChange, setError);
  return (
    <section className="notice bad" aria-label="Failure">
      <h2>{isFinal ? failedText(job) : "The last attempt failed"}</h2>
      <p>
        <strong>{failure.message}</strong>
      </p>
      {failure.hint && failure.code !== OUT_OF_TIME && <p>{failure.hint}</p>}
      {failure.detail && (
        <details>
          <summary>Details</summary>
          <pre className="wrap">{failure.detail}</pre>
        </details>
      )}
      <p className="sub">
        <code>{failure.code}</code> · {adviceText(job, resumes)}
      </p>
      <div className="actions">
        {mayWrite && ACTIONS[job.state].includes("retry") && (
          <>
            <button type="button" className={isWorthRetrying ? "primary" : undefined} onClick={() => retry()}>
              {resumes || "Retry"}
            </button>
            {failure.retryable && mayGoElsewhere && (
              <button
                type="button"
                title="Do not use workers on the machine of the last attempt"
                onClick={() => retry("?elsewhere=true")}
              >
                Retry on another machine
              </button>
            )}
          </>
        )}
        {mayWrite && isFinal && (
          <Link to="/jobs/new" search={{ from: job.id }} className={isWorthRetrying ? "button" : "button primary"}>
            Clone and change
          </Link>
        )}
        <Link to="/jobs/$id" params={{ id: job.id }} search={{ tab: "log" }} className="button">
          Open log
        </Link>
      </div>
      {error && <Failure error={error} />}
    </section>
  );
}

/** Whether there may be another machine: an operator sees the list of the workers, other people can only try. */
function useMayGoElsewhere(asks: boolean): boolean {
  const isOperator = useSession().can("operator");
  const { data } = useQuery(asks && isOperator ? "workers" : null, (signal) =>
    get<List<Worker>>("/v1/workers", {}, signal),
  );
  return !isOperator || new Set(data?.data.map((worker) => worker.host)).size > 1;
}
