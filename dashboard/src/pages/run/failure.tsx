import { useState } from "react";
import { get, post } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, List, Worker } from "../../api/types";
import { Link } from "../../link";
import { useSession } from "../../sign-in";
import { Failure } from "../../ui/basics";
import { ACTIONS } from "../../ui/states";
import type { Saved } from "./event-log";
import { failedText, resumesText } from "./timeline";

/** What has failed, where and why, and what to do: each of it a button. */
export function JobFailure({ job, saved, onChange }: { job: Job; saved: Saved | null; onChange: () => void }) {
  const mayWrite = useSession().can("jobs:write");
  const [error, setError] = useState<Error>();
  const failure = job.error;
  const mayGoElsewhere = useMayGoElsewhere(failure?.retryable === true);
  if (!failure) return null;
  const isFinal = job.state === "failed";
  const retry = (query = "") => post(`/v1/jobs/${job.id}/retry${query}`).then(onChange, setError);
  return (
    <section className="notice bad" aria-label="Failure">
      <h2>{isFinal ? failedText(job) : "The last attempt failed"}</h2>
      <p>
        <strong>{failure.message}</strong>
      </p>
      {failure.hint && <p>{failure.hint}</p>}
      {failure.detail && (
        <details>
          <summary>Details</summary>
          <pre className="wrap">{failure.detail}</pre>
        </details>
      )}
      <p className="sub">
        <code>{failure.code}</code> · {adviceText(job.state, failure.retryable)}
      </p>
      <div className="actions">
        {mayWrite && ACTIONS[job.state].includes("retry") && (
          <>
            <button type="button" className={failure.retryable ? "primary" : undefined} onClick={() => retry()}>
              {resumesText(job, saved, Date.now()) || "Retry"}
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
          <Link to="/jobs/new" search={{ from: job.id }} className={failure.retryable ? "button" : "button primary"}>
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

function adviceText(state: Job["state"], isRetryable: boolean | undefined): string {
  if (state !== "failed") return "the job continues automatically";
  return isRetryable ? "a retry may help" : "it will fail again unless something changes";
}
