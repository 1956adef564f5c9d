import { getRouteApi } from "@tanstack/react-router";
import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { Job, JobPage, State } from "../api/types";
import { formatBytes } from "../format";
import { Link } from "../link";
import { Empty, Pending, scrollable, Title } from "../ui/basics";
import { FINAL_STATES, STATE_ORDER } from "../ui/states";
import { OriginCells, RunLink, StateCells } from "./job-progress";

const EVERY_MS = 3000;
const LIMIT = 100;
const WAITING: State[] = ["queued", "retry_wait"];
const HELD = STATE_ORDER.filter((state) => !FINAL_STATES.has(state) && !WAITING.includes(state));

const route = getRouteApi("/queue");

/** The jobs that have not ended: those that run, page by page those that wait, next first, and those that are paused. */
export default function Queue() {
  const { cursor } = route.useSearch();
  const held = useQuery("held", (signal) => get<JobPage>("/v1/jobs", { state: HELD, limit: LIMIT }, signal), {
    everyMs: EVERY_MS,
  });
  const params = { state: WAITING, order: "queue", limit: LIMIT, cursor };
  const waiting = useQuery(`queue ${cursor}`, (signal) => get<JobPage>("/v1/jobs", params, signal), {
    everyMs: EVERY_MS,
  });
  const paused = held.data?.data.filter(({ state }) => state === "paused") ?? [];
  const running = held.data?.data.filter(({ state }) => state !== "paused") ?? [];
  const isLast = waiting.data && !waiting.data.next_cursor;
  const jobs = [...(cursor ? [] : running), ...(waiting.data?.data ?? []), ...(isLast ? paused : [])];
  return (
    <>
      <Title>Queue</Title>
      <Pending query={waiting} />
      {held.data && waiting.data && jobs.length === 0 && <Empty>No jobs are running or waiting.</Empty>}
      {jobs.length > 0 && <QueueTable jobs={jobs} />}
      {held.data?.next_cursor && !cursor && (
        <p className="hint">
          Of the runs that are running or paused, these are the newest {LIMIT}.{" "}
          <Link to="/" search={{ state: HELD }}>
            All of them
          </Link>
        </p>
      )}
      <div className="row">
        {cursor && (
          <Link to="/queue" search={{}}>
            ← Next in queue
          </Link>
        )}
        {waiting.data?.next_cursor && (
          <Link to="/queue" search={{ cursor: waiting.data.next_cursor }}>
            Later in queue →
          </Link>
        )}
      </div>
    </>
  );
}

function QueueTable({ jobs }: { jobs: Job[] }) {
  return (
    <div className="table runs" ref={scrollable}>
      <table>
        <thead>
          <tr>
            <th>Run</th>
            <th>State</th>
            <th>Progress</th>
            <th className="number">Priority</th>
            <th className="number">Memory needed</th>
            <th>Owner</th>
            <th>Created</th>
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <tr key={job.id}>
              <td className="name">
                <RunLink job={job} />
              </td>
              <StateCells job={job} />
              <td className="number" data-label="Priority">
                {job.priority}
              </td>
              <td className="number" data-label="Memory needed">
                {formatBytes(job.needs_memory_bytes)}
              </td>
              <OriginCells job={job} />
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
