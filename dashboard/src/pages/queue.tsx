import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { Job, JobPage } from "../api/types";
import { formatBytes } from "../format";
import { Empty, Pending, scrollable, Title } from "../ui/basics";
import { FINAL_STATES, STATE_ORDER } from "../ui/states";
import { OriginCells, RunLink, StateCells } from "./job-progress";

const EVERY_MS = 3000;
const LIMIT = 100;
const STATES = STATE_ORDER.filter((state) => !FINAL_STATES.has(state));

/** The jobs that have not ended: those that run, then those that wait, next first. */
export default function Queue() {
  const params = { state: STATES, limit: LIMIT };
  const query = useQuery("queue", (signal) => get<JobPage>("/v1/jobs", params, signal), { everyMs: EVERY_MS });
  const jobs = [...(query.data?.data ?? [])].sort((a, b) => rank(a) - rank(b));
  return (
    <>
      <Title>Queue</Title>
      <Pending query={query} />
      {query.data && jobs.length === 0 && <Empty>No jobs are running or waiting.</Empty>}
      {jobs.length > 0 && <QueueTable jobs={jobs} />}
      {query.data?.next_cursor && <p className="hint">These are the newest {LIMIT} jobs that have not ended.</p>}
    </>
  );
}

/** Running jobs have no position; jobs that wait for something other than a worker have none either. */
const rank = (job: Job) => (job.phase && job.state === "running" ? 0 : (job.queue_position ?? LIMIT + 1));

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
