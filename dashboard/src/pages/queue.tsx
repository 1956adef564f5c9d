import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { Job, JobPage } from "../api/types";
import { formatBytes } from "../format";
import { OPERATOR } from "../labels";
import { nameOf } from "../names";
import { Link } from "../router";
import { Empty, Pending, scrollable, Time, Title } from "../ui/basics";
import { StateLabel } from "../ui/states";
import { JobProgress } from "./job-progress";

const EVERY_MS = 3000;
const LIMIT = 100;
const STATES = ["running", "pausing", "cancelling", "queued", "retry_wait", "paused"];

/** The jobs that have not ended: those that run, then those that wait, next first. */
export default function Queue() {
  const params = { state: STATES, limit: LIMIT };
  const query = useQuery("queue", (signal) => get<JobPage>("/v1/jobs", params, signal), { everyMs: EVERY_MS });
  const jobs = [...(query.data?.data ?? [])].sort((a, b) => rank(a) - rank(b));
  return (
    <>
      <Title>Queue</Title>
      <Pending query={query} />
      {query.data && jobs.length === 0 && <Empty>Nothing runs, and nothing waits.</Empty>}
      {jobs.length > 0 && <QueueTable jobs={jobs} />}
      {query.data?.next_cursor && <p className="hint">These are the newest {LIMIT} jobs that have not ended.</p>}
    </>
  );
}

/** Running jobs have no position; jobs that wait for something else than a worker have none either. */
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
                <div>
                  <Link to={`/jobs/${job.id}`} title={job.id}>
                    {nameOf(job)}
                  </Link>
                </div>
              </td>
              <td data-label="State">
                <StateLabel state={job.state} />
              </td>
              <td className="progress">
                <JobProgress job={job} />
              </td>
              <td className="number" data-label="Priority">
                {job.priority}
              </td>
              <td className="number" data-label="Memory needed">
                {formatBytes(job.needs_memory_bytes)}
              </td>
              <td data-label="Owner">{job.submitted_by?.name ?? OPERATOR}</td>
              <td className="nowrap" data-label="Created">
                <Time at={job.created_at} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
