import { useEffect, useRef, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { failureOf, type Job, modelOf, progressOf, schemeOf } from "../../api/types";
import { formatDuration, plural, shortName } from "../../format";
import { Link, navigate, type Place, withParams } from "../../router";
import { announce } from "../../ui/announcer";
import { Bar, Failure, Loading, scrollable, TabPanel, Tabs, Time, Title } from "../../ui/basics";
import { FINAL_STATES, STATES, StateLabel } from "../../ui/states";
import { formatProgress } from "../job-progress";
import { RunActions } from "./actions";
import { Artifacts } from "./artifacts";
import { ConfigTab } from "./config";
import { Log } from "./log";
import { Overview } from "./overview";
import { type Story, useStory } from "./story";

const EVERY_MS = 2500;
const TABS = [
  { id: "overview", text: "Overview" },
  { id: "log", text: "Log" },
  { id: "config", text: "Config" },
  { id: "artifacts", text: "Artifacts" },
  { id: "events", text: "Events" },
];

export default function Run({ id, place: { search, path } }: { id: string; place: Place }) {
  const [isOver, setIsOver] = useState(false);
  const query = useQuery(`job ${id}`, (signal) => get<Job>(`/v1/jobs/${id}`, {}, signal), {
    everyMs: isOver ? 30_000 : EVERY_MS,
  });
  const [round, setRound] = useState(0);
  const { story, link } = useStory(id, round);
  const job = query.data;

  useEffect(() => setIsOver(!!job && FINAL_STATES.has(job.state) && !isPublishing(job)), [job]);
  useEffect(() => {
    if (story.state) query.reload();
  }, [story.state, query.reload]);
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
      <Title extra={<RunActions job={job} onChange={changed} />}>{job.name ?? shortName(modelOf(job))}</Title>
      <p className="row">
        <StateLabel state={job.state} />
        <code>{job.id}</code>
        <span className="faint">
          {modelOf(job)} · {schemeOf(job)} · by {job.submitted_by?.name ?? "operator"} · <Time at={job.created_at} />
          {job.attempt > 1 && ` · attempt ${job.attempt}`}
        </span>
        {job.cloned_from && <Link to={`/jobs/${job.cloned_from}`}>cloned from</Link>}
        {job.sweep_id && <Link to={`/?sweep=${job.sweep_id}`}>its sweep</Link>}
      </p>
      {link === "lost" && (
        <div className="notice warn" role="status">
          ⚠ The stream of events was cut. It goes on where it was as soon as the service answers.
        </div>
      )}
      <JobFailure job={job} />
      <Live job={job} story={story} />
      <Tabs tabs={TABS} shown={tab} onShow={show} label="About this run" />
      <TabPanel shown={tab}>
        {tab === "overview" && <Overview job={job} story={story} />}
        {tab === "log" && <Log job={job} line={Number(search.get("line")) || null} />}
        {tab === "config" && <ConfigTab job={job} />}
        {tab === "artifacts" && <Artifacts job={job} />}
        {tab === "events" && <Events story={story} />}
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
      <Link to="/">All runs</Link>
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
        <code>{failure.code}</code> · {failure.retryable ? "a retry can help" : "a retry alone will not help"}
      </p>
    </div>
  );
}

/** The phases of the present attempt, and how far the present one is. The stream knows it sooner than the job. */
function Live({ job, story }: { job: Job; story: Story }) {
  const progress = story.progress ?? progressOf(job);
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
          <Bar done={progress.done} total={progress.total} label={`${progress.phase} of this run`} />
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
    return `Waits: ${job.waiting_reason.replaceAll("_", " ")}${job.queue_position ? `, № ${job.queue_position} in the queue` : ""}.`;
  return FINAL_STATES.has(job.state) ? "It ended before its first phase." : "Starting.";
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

function Events({ story }: { story: Story }) {
  return (
    <div className="table" ref={scrollable}>
      <table>
        <caption>
          {plural(story.events.length, "event")}, without progress and the numbers of layers. All of them:{" "}
          <code>GET /v1/jobs/…/events</code>
        </caption>
        <thead>
          <tr>
            <th className="number">№</th>
            <th>When</th>
            <th>What</th>
            <th>Data</th>
          </tr>
        </thead>
        <tbody>
          {story.events.map((event) => (
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
    if (job && before.current && before.current !== job.state) announce(`The run is now: ${STATES[job.state].text}.`);
    before.current = job?.state;
  }, [job]);
}
