import { type FormEvent, useState } from "react";
import { post } from "../../api/client";
import type { Job, Publication, PublishPlan, Target } from "../../api/types";
import { formatBytes, plural } from "../../format";
import { useSession } from "../../sign-in";
import { announce } from "../../ui/announcer";
import { Bar, Dialog, Failure, Time } from "../../ui/basics";
import { HUB_TARGET, TargetFields } from "../target-fields";

const LOOKS: Record<string, [string, string]> = {
  pending: ["quiet", "◷ Pending"],
  publishing: ["busy", "▶ Publishing"],
  published: ["good", "✓ Published"],
  failed: ["bad", "✕ Failed"],
};

export const publicationText = ({ state }: Pick<Publication, "state">) => LOOKS[state]?.[1] ?? state;

/** Where the artifact is published, and a button to publish it. */
export function Publish({ job }: { job: Job }) {
  const session = useSession();
  const [asking, setAsking] = useState(false);
  const [error, setError] = useState<Error>();
  const publication = job.publication;
  if (job.state !== "succeeded") return null;
  const isBusy = publication?.state === "pending" || publication?.state === "publishing";
  return (
    <section className="card">
      <h2>Publish</h2>
      {publication ? <Shown publication={publication} /> : <p className="faint">Not published yet.</p>}
      {error && <Failure error={error} />}
      {session.can("jobs:write") && (
        <div className="row">
          <button type="button" disabled={isBusy} onClick={() => setAsking(true)}>
            Publish…
          </button>
          {publication?.state === "failed" && (
            <button type="button" onClick={() => post(`/v1/jobs/${job.id}/publish`).catch(setError)}>
              Try again
            </button>
          )}
        </div>
      )}
      {asking && <PublishDialog job={job} onClose={() => setAsking(false)} />}
    </section>
  );
}

/** An address as a link if a browser can open it. */
export function PublishedAt({ address }: { address: string }) {
  if (!address.startsWith("https://")) return <span>{address}</span>;
  return (
    <a href={address} rel="noreferrer">
      {address}
    </a>
  );
}

function Shown({ publication }: { publication: Publication }) {
  const [tone, text] = LOOKS[publication.state] ?? ["quiet", publication.state];
  const { target, url } = publication;
  const progress = publication.progress as { done: number; total: number } | null;
  const error = publication.error;
  return (
    <>
      <p className="row">
        <span className={`state ${tone}`}>{text}</span>
        <PublishedAt address={url ?? String(target.repo_id ?? target.to)} />
        {publication.revision && <code>{publication.revision.slice(0, 12)}</code>}
        <Time at={publication.finished_at} />
      </p>
      {progress && !publication.finished_at && (
        <Bar done={progress.done} total={progress.total} label="Publish progress" />
      )}
      {error && (
        <p className="error">
          ✕ {error.message} {error.hint} <code>{error.code}</code>
        </p>
      )}
    </>
  );
}

function PublishDialog({ job, onClose }: { job: Job; onClose: () => void }) {
  const [target, setTarget] = useState<Target>(HUB_TARGET);
  const [plan, setPlan] = useState<PublishPlan>();
  const [error, setError] = useState<Error>();
  const send = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      if (!plan) return setPlan(await post<PublishPlan>(`/v1/jobs/${job.id}/publish`, target, { dry_run: true }));
      await post(`/v1/jobs/${job.id}/publish`, target);
      announce("Publishing has started.");
      onClose();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  const change = (next: Target) => {
    setTarget(next);
    setPlan(undefined);
  };
  return (
    <Dialog title="Publish artifact" onClose={onClose}>
      <form onSubmit={send}>
        <TargetFields target={target} onChange={change} />
        {error && <Failure error={error} />}
        {plan && (
          <div className="notice good">
            {plural(plan.files.length, "file")}, up to {formatBytes(plan.bytes)}, will be published to {plan.url}
            {plan.exists === false && ", which will be created"}.
          </div>
        )}
        <div className="actions">
          <button type="submit" className="primary" disabled={!(target.repo_id || target.to)}>
            {plan ? "Publish" : "Preview"}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
