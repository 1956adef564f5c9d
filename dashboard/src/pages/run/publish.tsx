import { type FormEvent, useState } from "react";
import { get, post } from "../../api/client";
import { useQuery } from "../../api/query";
import type { HubToken, Job, JobFailure, List, Publication } from "../../api/types";
import { formatBytes, plural } from "../../format";
import { useSession } from "../../sign-in";
import { announce } from "../../ui/announcer";
import { Bar, Dialog, Failure, Field, Time } from "../../ui/basics";

interface Plan {
  url: string;
  exists: boolean | null;
  bytes: number;
  files: unknown[];
}

const LOOKS: Record<string, [string, string]> = {
  pending: ["quiet", "◷ Pending"],
  publishing: ["busy", "▶ Publishing"],
  published: ["good", "✓ Published"],
  failed: ["bad", "✕ Failed"],
};

/** Where the artifact was published, and the way to publish it. */
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
      {publication ? <Shown publication={publication} /> : <p className="faint">It has not been published.</p>}
      {error && <Failure error={error} />}
      {session.can("jobs:write") && (
        <div className="row">
          <button disabled={isBusy} onClick={() => setAsking(true)}>
            Publish …
          </button>
          {publication?.state === "failed" && (
            <button onClick={() => post(`/v1/jobs/${job.id}/publish`).catch(setError)}>Try again</button>
          )}
        </div>
      )}
      {asking && <PublishDialog job={job} onClose={() => setAsking(false)} />}
    </section>
  );
}

function Shown({ publication }: { publication: Publication }) {
  const [tone, text] = LOOKS[publication.state] ?? ["quiet", publication.state];
  const { target, url } = publication;
  const progress = publication.progress as { done: number; total: number } | null;
  const error = publication.error as JobFailure | null;
  return (
    <>
      <p className="row">
        <span className={`state ${tone}`}>{text}</span>
        {url?.startsWith("https://") ? (
          <a href={url} rel="noreferrer">
            {url}
          </a>
        ) : (
          <span>{url ?? String(target.repo_id ?? target.to)}</span>
        )}
        {publication.revision && <code>{publication.revision.slice(0, 12)}</code>}
        <Time at={publication.finished_at} />
      </p>
      {progress && !publication.finished_at && <Bar done={progress.done} total={progress.total} label="Published" />}
      {error && (
        <p className="error">
          ✕ {error.message} {error.hint} <code>{error.code}</code>
        </p>
      )}
    </>
  );
}

function PublishDialog({ job, onClose }: { job: Job; onClose: () => void }) {
  const tokens = useQuery("hub-tokens", (signal) => get<List<HubToken>>("/v1/hub-tokens", {}, signal));
  const [isUrl, setIsUrl] = useState(false);
  const [place, setPlace] = useState("");
  const [revision, setRevision] = useState("");
  const [token, setToken] = useState("");
  const [isPrivate, setIsPrivate] = useState(true);
  const [asPullRequest, setAsPullRequest] = useState(false);
  const [plan, setPlan] = useState<Plan>();
  const [error, setError] = useState<Error>();
  const target = isUrl
    ? { to: place }
    : {
        repo_id: place,
        private: isPrivate,
        ...(revision && { revision }),
        ...(asPullRequest && { create_pr: true }),
        ...(token && { hub_token: token }),
      };
  const send = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      if (!plan) return setPlan(await post<Plan>(`/v1/jobs/${job.id}/publish`, target, { dry_run: true }));
      await post(`/v1/jobs/${job.id}/publish`, target);
      announce("The artifact is being published.");
      onClose();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  const change = <T,>(set: (value: T) => void) => (value: T) => {
    set(value);
    setPlan(undefined);
  };
  return (
    <Dialog title="Publish the artifact" onClose={onClose}>
      <form onSubmit={send}>
        <div className="choices field">
          <label>
            <input type="radio" name="target" checked={!isUrl} onChange={() => change(setIsUrl)(false)} /> Hugging Face Hub
          </label>
          <label>
            <input type="radio" name="target" checked={isUrl} onChange={() => change(setIsUrl)(true)} /> A folder behind a URL
          </label>
        </div>
        <Field label={isUrl ? "URL" : "Repository"} hint={isUrl ? "One that the operator allows." : undefined}>
          {(props) => <input {...props} required placeholder={isUrl ? "s3://bucket/models/name" : "org/name"} value={place} onChange={(event) => change(setPlace)(event.target.value)} />}
        </Field>
        {!isUrl && (
          <>
            <div className="fields">
              <Field label="Branch">
                {(props) => <input {...props} placeholder="main" value={revision} onChange={(event) => change(setRevision)(event.target.value)} />}
              </Field>
              <Field label="Token" hint="One that the project keeps.">
                {(props) => (
                  <select {...props} value={token} onChange={(event) => change(setToken)(event.target.value)}>
                    <option value="">the job's</option>
                    {tokens.data?.data.map((each) => (
                      <option key={each.name}>{each.name}</option>
                    ))}
                  </select>
                )}
              </Field>
            </div>
            <div className="choices">
              <label>
                <input type="checkbox" checked={isPrivate} onChange={(event) => change(setIsPrivate)(event.target.checked)} /> Private, if it is made
              </label>
              <label>
                <input type="checkbox" checked={asPullRequest} onChange={(event) => change(setAsPullRequest)(event.target.checked)} /> As a pull request
              </label>
            </div>
          </>
        )}
        {error && <Failure error={error} />}
        {plan && (
          <div className="notice good">
            {plural(plan.files.length, "file")}, {formatBytes(plan.bytes)} at most, to {plan.url}
            {plan.exists === false && ", which will be made"}.
          </div>
        )}
        <div className="actions">
          <button className="primary" disabled={!place}>
            {plan ? "Publish" : "Check"}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
