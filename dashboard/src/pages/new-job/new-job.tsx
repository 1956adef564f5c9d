import { useEffect, useMemo, useState } from "react";
import { get, Problem, request } from "../../api/client";
import type { Job, List, Plan, Preset } from "../../api/types";
import { navigate, type Place } from "../../router";
import { Code, Failure, Loading, TabPanel, Tabs, Title } from "../../ui/basics";
import { type Body, bodyOf, START } from "./body";
import { asCommand, asCurl, asPython, missingInCommand } from "./copies";
import { JobForm } from "./form";
import { PlanPanel } from "./plan-panel";

const TABS = [
  { id: "form", text: "Form" },
  { id: "json", text: "JSON" },
  { id: "copy", text: "Copy as" },
];
const WAIT_MS = 400;

export default function NewJob({ place: { search } }: { place: Place }) {
  const from = search.get("from");
  const [body, setBody] = useState<Body | null>(from ? null : START);
  const [error, setError] = useState<Error>();
  useEffect(() => {
    if (!from) return;
    Promise.all([get<Job>(`/v1/jobs/${from}`), get<List<Preset>>("/v1/presets")]).then(
      ([job, presets]) => setBody(bodyOf(job, presets.data)),
      setError,
    );
  }, [from]);
  return (
    <>
      <Title>{from ? "Clone a run" : "New job"}</Title>
      {error && <Failure error={error} />}
      {body ? <Editor body={body} onChange={setBody} /> : !error && <Loading />}
    </>
  );
}

function Editor({ body, onChange }: { body: Body; onChange: (body: Body) => void }) {
  const [tab, setTab] = useState("form");
  const [failed, setFailed] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const { plan, error, isPlanning } = usePlan(body);
  const errorAt = useMemo(() => pointed(error), [error]);

  const submit = async () => {
    setBusy(true);
    setFailed(undefined);
    try {
      const headers = { "Idempotency-Key": randomKey() };
      const job = await request<Job>("POST", "/v1/jobs", { body, headers });
      navigate(`/jobs/${job.id}`);
    } catch (caught) {
      setFailed(caught as Error);
      setBusy(false);
    }
  };
  return (
    <div className="two">
      <div className="card">
        <Tabs tabs={TABS} shown={tab} onShow={setTab} label="Ways to write the request" />
        <TabPanel shown={tab}>
          {tab === "form" && <JobForm body={body} onChange={onChange} errorAt={errorAt} />}
          {tab === "json" && <JsonTab body={body} onChange={onChange} />}
          {tab === "copy" && <CopyTab body={body} />}
        </TabPanel>
        {failed && <Failure error={failed} />}
        <div className="actions">
          <button type="button" className="primary" disabled={busy || !plan || !!error} onClick={submit}>
            Start the job
          </button>
          {!plan && <span className="faint">It can be started once its plan stands.</span>}
        </div>
      </div>
      <PlanPanel plan={plan} error={error} isPlanning={isPlanning} hasModel={!!(body.model.path || body.model.id)} />
    </div>
  );
}

/** For a request that is sent twice by accident. `crypto.randomUUID` is only there over TLS. */
const randomKey = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** What is wrong at a place of the request, in the words of the service. */
function pointed(error: Error | undefined) {
  const found = new Map<string, string>();
  for (const entry of error instanceof Problem ? error.errors : []) {
    const pointer = (entry.pointer ?? "").replace(/^#/, "");
    if (!found.has(pointer)) found.set(pointer, entry.detail);
  }
  return (pointer: string) => found.get(pointer);
}

/** The plan of the request as it stands, asked for when nothing has been typed for a moment. */
function usePlan(body: Body) {
  const [answer, setAnswer] = useState<{ plan?: Plan; error?: Error }>({});
  const [isPlanning, setIsPlanning] = useState(false);
  const text = JSON.stringify(body);
  useEffect(() => {
    const asked = JSON.parse(text) as Body;
    if (!asked.model.path && !asked.model.id) {
      setAnswer({});
      return;
    }
    const controller = new AbortController();
    setIsPlanning(true);
    const timer = window.setTimeout(async () => {
      try {
        const query = { dry_run: true };
        const plan = await request<Plan>("POST", "/v1/jobs", { body: asked, query, signal: controller.signal });
        setAnswer({ plan });
      } catch (error) {
        if (controller.signal.aborted) return;
        setAnswer({ error: error as Error });
      }
      setIsPlanning(false);
    }, WAIT_MS);
    return () => {
      window.clearTimeout(timer);
      controller.abort();
    };
  }, [text]);
  return { ...answer, isPlanning };
}

function JsonTab({ body, onChange }: { body: Body; onChange: (body: Body) => void }) {
  const [text, setText] = useState(JSON.stringify(body, null, 2));
  const [wrong, setWrong] = useState("");
  const edit = (next: string) => {
    setText(next);
    try {
      const parsed = JSON.parse(next);
      if (typeof parsed !== "object" || parsed === null || !parsed.model || !(parsed.config || parsed.mix))
        throw new Error("`model` and `config` or `mix` must be there");
      onChange(parsed as Body);
      setWrong("");
    } catch (error) {
      setWrong((error as Error).message);
    }
  };
  return (
    <>
      <label className="hidden" htmlFor="request">
        The request as JSON
      </label>
      <textarea
        id="request"
        rows={26}
        spellCheck={false}
        value={text}
        aria-invalid={wrong ? true : undefined}
        onChange={(event) => edit(event.target.value)}
      />
      {wrong && <p className="error">✕ {wrong}</p>}
    </>
  );
}

function CopyTab({ body }: { body: Body }) {
  const origin = window.location.origin;
  const missing = missingInCommand(body);
  return (
    <>
      <p className="hint">
        They take the key from <code>BITFOUNDRY_API_KEY</code>.
      </p>
      <h3>curl</h3>
      <Code text={asCurl(body, origin)} label="As curl" />
      <h3>Command</h3>
      {missing.length > 0 && <p className="hint">⚠ The command has no option for {missing.join(" and ")}.</p>}
      <Code text={asCommand(body, origin)} label="As a command" />
      <h3>Python</h3>
      <Code text={asPython(body, origin)} label="As Python" />
    </>
  );
}
