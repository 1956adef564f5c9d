import { getRouteApi, useNavigate } from "@tanstack/react-router";
import { useEffect, useMemo, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { type Job, modelOf, schemeOf } from "../../api/types";
import { plural, shortId } from "../../format";
import { OPERATOR } from "../../labels";
import { Link } from "../../link";
import { nameOf } from "../../names";
import { useSession } from "../../sign-in";
import { useStateChanges } from "../../state-changes";
import { announce } from "../../ui/announcer";
import { Failure, Loading, TabPanel, Tabs, Time, Title } from "../../ui/basics";
import { FINAL_STATES, STATES, StateLabel } from "../../ui/states";
import { Table } from "../../ui/table";
import { RunActions } from "./actions";
import { Artifacts } from "./artifacts";
import { TryIt } from "./chat";
import { ConfigTab } from "./config";
import { type EventLog, useEventLog } from "./event-log";
import { JobFailure } from "./failure";
import { Log } from "./log";
import { Overview } from "./overview";
import { Phases } from "./phases";

const EVERY_MS = 2500;
const TABS = [
  { id: "overview", text: "Overview" },
  { id: "log", text: "Log" },
  { id: "config", text: "Config" },
  { id: "artifacts", text: "Artifacts" },
  { id: "events", text: "Events" },
];
const TRY_IT = { id: "chat", text: "Try it" };

const route = getRouteApi("/jobs/$id");

export default function Run() {
  const { id } = route.useParams();
  const search = route.useSearch();
  const navigate = useNavigate();
  const query = useQuery(`job ${id}`, (signal) => get<Job>(`/v1/jobs/${id}`, {}, signal), {
    everyMs: (read) => (read && FINAL_STATES.has(read.state) && !isPublishing(read) ? 30_000 : EVERY_MS),
  });
  const [round, setRound] = useState(0);
  const { log: eventLog, link } = useEventLog(id, round);
  const job = query.data;
  const mayChat = useSession().can("jobs:chat") && job?.state === "succeeded";

  useEffect(() => {
    if (eventLog.state) query.reload();
  }, [eventLog.state, query.reload]);
  useStateChanges(
    useMemo(() => (job ? [job] : []), [job]),
    (changed) => {
      for (const { state } of changed) announce(`Run state: ${STATES[state].text}.`);
    },
  );

  if (!job) return query.error ? <NoRun error={query.error} retry={query.reload} /> : <Loading />;
  const tab = search.tab ?? "overview";
  const show = (to: string) => void navigate({ to: "/jobs/$id", params: { id }, search: { tab: to }, replace: true });
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
          <Link to="/models" search={{ model: modelOf(job) }} title="Results of this model">
            {modelOf(job)}
          </Link>{" "}
          · {schemeOf(job)} · submitted by {job.submitted_by?.name ?? OPERATOR} · <Time at={job.created_at} />
          {job.attempt > 1 && ` · attempt ${job.attempt}`}
        </span>
        {job.cloned_from && (
          <Link to="/jobs/$id" params={{ id: job.cloned_from }}>
            Cloned from {shortId(job.cloned_from)}
          </Link>
        )}
        {job.sweep_id && (
          <Link to="/sweeps/$id" params={{ id: job.sweep_id }}>
            View sweep
          </Link>
        )}
      </p>
      {link === "lost" && (
        <div className="notice warn" role="status">
          ⚠ The event stream was interrupted. It resumes when the service responds.
        </div>
      )}
      <JobFailure job={job} eventLog={eventLog} onChange={changed} />
      {job.state !== "succeeded" && <Phases job={job} eventLog={eventLog} />}
      <Tabs tabs={mayChat ? [...TABS, TRY_IT] : TABS} shown={tab} onShow={show} label="Run details" />
      <TabPanel shown={tab} busy={FINAL_STATES.has(job.state) && link === "open"}>
        {tab === "overview" && <Overview job={job} eventLog={eventLog} />}
        {tab === "log" && <Log job={job} line={Number(search.line) || null} />}
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

function Events({ eventLog }: { eventLog: EventLog }) {
  return (
    <Table
      caption={
        <>
          {plural(eventLog.events.length, "event")}. Progress, saved blocks and layer metrics are not listed;{" "}
          <code>GET /v1/jobs/…/events</code> returns all events.
        </>
      }
      head={
        <>
          <th className="number">#</th>
          <th>Time</th>
          <th>Event</th>
          <th>Data</th>
        </>
      }
    >
      {eventLog.events.map((event) => (
        <tr key={event.seq}>
          <td className="number">{event.seq}</td>
          <td className="nowrap">
            <Time at={event.at} />
          </td>
          <td className="nowrap">{event.kind.replaceAll("_", " ")}</td>
          <td className="wide">
            <code className="wrap">{JSON.stringify(event.data).slice(0, 600)}</code>
          </td>
        </tr>
      ))}
    </Table>
  );
}
