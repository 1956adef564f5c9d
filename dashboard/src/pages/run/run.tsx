import { useEffect, useRef, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { failureOf, type Job, modelOf, progressOf, schemeOf } from "../../api/types";
import { formatDuration, plural, shortId } from "../../format";
import { OPERATOR } from "../../labels";
import { nameOf } from "../../names";
import { Link, navigate, type Place, withParams } from "../../router";
import { useSession } from "../../sign-in";
import { announce } from "../../ui/announcer";
import { Bar, Failure, Loading, scrollable, TabPanel, Tabs, Time, Title } from "../../ui/basics";
import { FINAL_STATES, STATES, StateLabel } from "../../ui/states";
import { formatProgress } from "../job-progress";
import { modelAddress } from "../models/results";
import { RunActions } from "./actions";
import { Artifacts } from "./artifacts";
import { TryIt } from "./chat";
import { ConfigTab } from "./config";
import { type EventLog, useEventLog } from "./event-log";
import { Log } from "./log";
import { Overview } from "./overview";

const EVERY_MS = 2500;
const TABS = [
  { id: "overview", text: "Overview" },
  { id: "log", text: "Log" },
  { id: "config", text: "Config" },
  { id: "artifacts", text: "Artifacts" },
  { id: "events", text: "Events" },
];
const TRY_IT = { id: "chat", text: "Try it" };

export default function Run({ id, place: { search, path } }: { id: string; place: Place }) {
  const [isOver, setIsOver] = useState(false);
  const query = useQuery(`job ${id}`, (signal) => get<Job>(`/v1/jobs/${id}`, {}, signal), {
    everyMs: isOver ? 30_000 : EVERY_MS,
  });
  const [round, setRound] = useState(0);
  const { log: eventLog, link } = useEventLog(id, round);
  const job = query.data;
  const mayChat = useSession().can("jobs:chat") && job?.state === "succeeded";

  useEffect(() => setIsOver(!!job && FINAL_STATES.has(job.state) && !isPublishing(job)), [job]);
  useEffect(() => {
    if (eventLog.state) query.reload();
  }, [eventLog.state, query.reload]);
  useAnnounceStateChanges(job);

  if (!job) return query.error ? <NoRun error={query.error} retry={query.reload} /> : <Loading />;
  const tab = search.get("tab") ?? "overview";
  const show = (to: string) => navigate(`${path}${withParams(search, { tab: to, line: null })}`, { replace: true });
  const changed = () => {
    query.reload();
    if (link === "ended") setRound(round + 1);
  };
  return (
    <>
      <Title extra={<RunActions job={job} onChange={changed} />}>{nameOf(job)}</Title>
      <p className="row">
        <StateLabel state={job.state} />
        <code>{job.id}</code>
        <span className="faint">
          <Link to={modelAddress(modelOf(job))} title="Results of this model">
            {modelOf(job)}
          </Link>{" "}
          · {schemeOf(job)} · submitted by {job.submitted_by?.name ?? OPERATOR} · <Time at={job.created_at} />
          {job.attempt > 1 && ` · attempt ${job.attempt}`}
        </span>
        {job.cloned_from && <Link to={`/jobs/${job.cloned_from}`}>Cloned from {shortId(job.cloned_from)}</Link>}
        {job.sweep_id && <Link to={`/?sweep=${job.sweep_id}`}>View sweep</Link>}
      </p>
      {link === "lost" && (
        <div className="notice warn" role="status">
          ⚠ The event stream was interrupted. It resumes when the service responds.
        </div>
      )}
      <JobFailure job={job} />
      <Live job={job} eventLog={eventLog} />
      <Tabs tabs={mayChat ? [...TABS, TRY_IT] : TABS} shown={tab} onShow={show} label="Run details" />
      <TabPanel shown={tab}>
        {tab === "overview" && <Overview job={job} eventLog={eventLog} />}
        {tab === "log" && <Log job={job} line={Number(search.get("line")) || null} />}
        {tab === "config" && <ConfigTab job={job} />}
        {tab === "artifacts" && <Artifacts job={job} />}
        {tab === "events" && <Events eventLog={eventLog} />}
        {tab === TRY_IT.id && mayChat && <TryIt job={job} />}
      </TabPanel>
    </>
  );
}

const isPublishing = (job: Job) => ["pending", "publishing"].includes(job.publication?.state ?? "");

function NoRun({ error, retry }: { error: Error; retry: () => void }) {
  return (
    <>
      <Title>Run</Title>
      <Failure error={error} retry={retry} />
      <Link to="/">View all runs</Link>
    </>
  );
}

function JobFailure({ job }: { job: Job }) {
  const failure = failureOf(job);
  if (!failure) return null;
  return (
    <div className="notice bad">
      <p>
        <strong>{failure.message}</strong> {failure.hint}
      </p>
      <p className="sub">
        <code>{failure.code}</code> ·{" "}
        {failure.retryable ? "retrying may help" : "retrying without changes will not help"}
      </p>
    </div>
  );
}

/** The phases of the current attempt and the progress of the current phase. Events arrive before the job is polled. */
function Live({ job, eventLog }: { job: Job; eventLog: EventLog }) {
  const progress = eventLog.progress ?? progressOf(job);
  const isRunning = !FINAL_STATES.has(job.state) && !!job.phase;
  return (
    <section className="card" aria-label="Phases">
      {job.phases.length === 0 && <p className="faint">{waitingText(job)}</p>}
      <ol className="phases">
        {job.phases.map((phase) => (
          <li key={phase.name} className={phase.state}>
            <strong>{phase.name}</strong>{" "}
            <span className="sub">
              {phase.state === "done" ? "✓ " : phase.state === "stopped" ? "✕ stopped " : "▶ "}
              <PhaseTime start={phase.started_at} end={phase.ended_at} />
            </span>
          </li>
        ))}
      </ol>
      {isRunning && progress && progress.phase === job.phase && (
        <>
          <Bar done={progress.done} total={progress.total} label={`Progress of ${progress.phase}`} />
          <p className="sub">
            {formatProgress(progress)}
            {progress.eta_s ? ` · ${formatDuration(progress.eta_s)} left in this phase` : ""}
          </p>
        </>
      )}
    </section>
  );
}

function waitingText(job: Job): string {
  if (job.waiting_reason)
    return `Waiting: ${job.waiting_reason.replaceAll("_", " ")}${job.queue_position ? `, #${job.queue_position} in queue` : ""}.`;
  return FINAL_STATES.has(job.state) ? "The run ended before its first phase." : "Starting…";
}

function PhaseTime({ start, end }: { start: string; end: string | null }) {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    if (end) return;
    const timer = window.setInterval(() => setNow(Date.now()), 1000);
    return () => window.clearInterval(timer);
  }, [end]);
  return <>{formatDuration(((end ? Date.parse(end) : now) - Date.parse(start)) / 1000)}</>;
}

function Events({ eventLog }: { eventLog: EventLog }) {
  return (
    <div className="table" ref={scrollable}>
      <table>
        <caption>
          {plural(eventLog.events.length, "event")}. Progress and layer metrics are not listed;{" "}
          <code>GET /v1/jobs/…/events</code> returns all events.
        </caption>
        <thead>
          <tr>
            <th className="number">#</th>
            <th>Time</th>
            <th>Event</th>
            <th>Data</th>
          </tr>
        </thead>
        <tbody>
          {eventLog.events.map((event) => (
            <tr key={event.seq}>
              <td className="number">{event.seq}</td>
              <td className="nowrap">
                <Time at={event.at} />
              </td>
              <td className="nowrap">{event.kind.replaceAll("_", " ")}</td>
              <td>
                <code className="wrap">{JSON.stringify(event.data).slice(0, 600)}</code>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Announces to screen readers that the run has changed its state. */
function useAnnounceStateChanges(job: Job | undefined) {
  const before = useRef(job?.state);
  useEffect(() => {
    if (job && before.current && before.current !== job.state) announce(`Run state: ${STATES[job.state].text}.`);
    before.current = job?.state;
  }, [job]);
}
