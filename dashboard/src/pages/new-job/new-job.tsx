import { getRouteApi, useNavigate } from "@tanstack/react-router";
import { useEffect, useMemo, useState } from "react";
import { get, Problem, request } from "../../api/client";
import type { Job, List, Plan, Preset, Report } from "../../api/types";
import { Code, Failure, Loading, TabPanel, Tabs, Title } from "../../ui/basics";
import { type Algorithm, type Body, bodyOf, isInMore, START_GOAL, setsMore } from "./body";
import { JobForm } from "./form";
import { PlanPanel } from "./plan-panel";
import { asCommand, asCurl, asPython, missingInCommand } from "./snippets";
import { type Changes, withChanges, withMoreBits } from "./steps";

const TABS = [
  { id: "form", text: "Form" },
  { id: "json", text: "JSON" },
  { id: "code", text: "Code" },
];
const WAIT_MS = 400;

const route = getRouteApi("/jobs/new");

export default function NewJob() {
  const { from, path = "", preset, ...changes } = route.useSearch();
  const [changesOfAddress] = useState(changes);
  const start = preset ? { config: { preset } } : { goal: START_GOAL };
  const [body, setBody] = useState<Body | null>(from ? null : { model: { path }, ...start });
  const [error, setError] = useState<Error>();
  useEffect(() => {
    if (!from) return;
    startOf(from, changesOfAddress).then(setBody, setError);
  }, [from, changesOfAddress]);
  return (
    <>
      <Title>{from ? "Clone run" : "New job"}</Title>
      {error && <Failure error={error} />}
      {body ? <Editor body={body} onChange={setBody} /> : !error && <Loading />}
    </>
  );
}

/** The request that clones a run, with the changes of the address. */
async function startOf(from: string, changes: Changes): Promise<Body> {
  const [job, presets, report] = await Promise.all([
    get<Job>(`/v1/jobs/${from}`),
    get<List<Preset>>("/v1/presets"),
    changes.more_bits ? get<Report>(`/v1/jobs/${from}/artifacts/report.json`) : undefined,
  ]);
  const body = withChanges(bodyOf(job, presets.data), changes);
  return report?.more_bits ? withMoreBits(body, report.more_bits) : body;
}

function Editor({ body, onChange }: { body: Body; onChange: (body: Body) => void }) {
  const navigate = useNavigate();
  const [tab, setTab] = useState("form");
  const [isMoreOpen, setIsMoreOpen] = useState(() => setsMore(body));
  const [failed, setFailed] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const { plan, error, isPlanning } = usePlan(body);
  const errors = useMemo(() => byPointer(error), [error]);
  const errorAt = (pointer: string) => errors.get(pointer);
  const isMoreWrong = [...errors.keys()].some(isInMore);
  const more = { isOpen: isMoreOpen || isMoreWrong, onToggle: setIsMoreOpen };
  const planned = isPlanning ? undefined : (plan?.config.algo_config as Algorithm[] | undefined);

  const submit = async () => {
    setBusy(true);
    setFailed(undefined);
    try {
      const headers = { "Idempotency-Key": randomKey() };
      const job = await request<Job>("POST", "/v1/jobs", { body, headers });
      await navigate({ to: "/jobs/$id", params: { id: job.id } });
    } catch (caught) {
      setFailed(caught as Error);
      setBusy(false);
    }
  };
  return (
    <div className="two">
      <div className="card">
        <Tabs tabs={TABS} shown={tab} onShow={setTab} label="Request editor" />
        <TabPanel shown={tab}>
          {tab === "form" && (
            <JobForm body={body} onChange={onChange} errorAt={errorAt} more={more} planned={planned} />
          )}
          {tab === "json" && <JsonTab body={body} onChange={onChange} />}
          {tab === "code" && <CodeTab body={body} />}
        </TabPanel>
        {failed && <Failure error={failed} />}
        <div className="actions">
          <button type="button" className="primary" disabled={busy || !plan || !!error} onClick={submit}>
            Start job
          </button>
          {!plan && <span className="faint">The job can start when its plan is valid.</span>}
        </div>
      </div>
      <PlanPanel body={body} plan={plan} error={error} isPlanning={isPlanning} />
    </div>
  );
}

/** Protects against a request that is sent twice by accident. `crypto.randomUUID` exists only over TLS. */
const randomKey = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** The error message of the service for each pointer into the request. */
function byPointer(error: Error | undefined) {
  const details = new Map<string, string>();
  for (const entry of error instanceof Problem ? error.errors : []) {
    const pointer = (entry.pointer ?? "").replace(/^#/, "");
    if (!details.has(pointer)) details.set(pointer, entry.detail);
  }
  return details;
}

/** The plan of the current request, fetched after a short pause in typing. */
function usePlan(body: Body) {
  const [answer, setAnswer] = useState<{ plan?: Plan; error?: Error }>({});
  const [isPlanning, setIsPlanning] = useState(false);
  const text = JSON.stringify(body);
  useEffect(() => {
    const current = JSON.parse(text) as Body;
    if (!current.model.path && !current.model.id) {
      setAnswer({});
      return;
    }
    const controller = new AbortController();
    setIsPlanning(true);
    const timer = window.setTimeout(async () => {
      try {
        const query = { dry_run: true };
        const plan = await request<Plan>("POST", "/v1/jobs", { body: current, query, signal: controller.signal });
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
      if (
        typeof parsed !== "object" ||
        parsed === null ||
        !parsed.model ||
        !(parsed.goal || parsed.config || parsed.mix)
      )
        throw new Error("`model` and one of `goal`, `config` and `mix` are required");
      onChange(parsed as Body);
      setWrong("");
    } catch (error) {
      setWrong((error as Error).message);
    }
  };
  return (
    <>
      <label className="hidden" htmlFor="request">
        Request JSON
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

function CodeTab({ body }: { body: Body }) {
  const origin = window.location.origin;
  const missing = missingInCommand(body);
  return (
    <>
      <p className="hint">
        Set <code>BITFOUNDRY_API_KEY</code> to your API key first.
      </p>
      <h3>curl</h3>
      <Code text={asCurl(body, origin)} label="curl snippet" />
      <h3>Command line</h3>
      {missing.length > 0 && <p className="hint">⚠ The command line has no option for {missing.join(" and ")}.</p>}
      <Code text={asCommand(body, origin)} label="Command-line snippet" />
      <h3>Python</h3>
      <Code text={asPython(body, origin)} label="Python snippet" />
    </>
  );
}
