import { useState } from "react";
import { get, post } from "../api/client";
import { useQuery } from "../api/query";
import type { List, Worker } from "../api/types";
import { formatBytes, plural } from "../format";
import { Link } from "../link";
import { ActionsHead, Confirm, Empty, Failure, Time, Title } from "../ui/basics";
import { Listing } from "../ui/table";

interface Device {
  kind?: string;
  name?: string;
  memory_bytes?: number;
}

const STATES = { ready: "✓ Ready", draining: "‖ Draining", blocked: "! Blocked", silent: "? Not responding" };

export default function Workers() {
  const query = useQuery("workers", (signal) => get<List<Worker>>("/v1/workers", {}, signal), { everyMs: 4000 });
  const [draining, setDraining] = useState<Worker | null>(null);
  const [error, setError] = useState<Error>();
  const act = async (worker: Worker, action: "drain" | "uncordon") => {
    await post(`/v1/workers/${encodeURIComponent(worker.id)}/${action}`);
    query.reload();
  };
  return (
    <>
      <Title>Workers</Title>
      {error && <Failure error={error} />}
      <Listing
        query={query}
        empty={
          <Empty>
            No workers. Jobs wait until one starts: run <code>python -m worker</code> or <code>make up</code>.
          </Empty>
        }
        head={
          <>
            <th>Worker</th>
            <th>State</th>
            <th>Devices</th>
            <th className="number">Memory</th>
            <th>Current jobs</th>
            <th>Last heartbeat</th>
            <th>Started</th>
            <ActionsHead />
          </>
        }
        row={(worker) => (
          <tr key={worker.id}>
            <td>
              <strong>{worker.host}</strong>
              <div className="sub nowrap">
                {worker.id} · {plural(worker.num_slots, "slot")}
                {worker.launcher !== "local" && ` · engines run in ${worker.launcher}`}
              </div>
            </td>
            <td>
              <span className={`state ${worker.state === "ready" ? "good" : "warn"}`}>{STATES[worker.state]}</span>
              {worker.blocked_reason && <div className="sub">{worker.blocked_reason}</div>}
              <div className="sub nowrap">
                sandbox: {worker.sandbox} · memory: {worker.memory_limit}
              </div>
            </td>
            <td>
              {worker.devices.length === 0 && "CPU"}
              {(worker.devices as Device[]).map((device, index) => (
                // biome-ignore lint/suspicious/noArrayIndexKey: a worker's devices are numbered
                <div key={index} className="nowrap">
                  {device.name ?? device.kind} {device.memory_bytes ? formatBytes(device.memory_bytes) : ""}
                </div>
              ))}
            </td>
            <td className="number">{formatBytes(worker.memory_bytes)}</td>
            <td>
              {worker.jobs.length === 0 && <span className="faint">idle</span>}
              {worker.jobs.map((job) => (
                <div key={job.id}>
                  <Link to="/jobs/$id" params={{ id: job.id }}>
                    …{job.id.slice(-8)}
                  </Link>{" "}
                  {job.phase ?? job.state}
                </div>
              ))}
            </td>
            <td>
              <Time at={worker.beat_at} />
            </td>
            <td>
              <Time at={worker.started_at} />
            </td>
            <td>
              {worker.drain_requested_at === null ? (
                <button type="button" className="small" onClick={() => setDraining(worker)}>
                  Drain
                </button>
              ) : (
                <button type="button" className="small" onClick={() => act(worker, "uncordon").catch(setError)}>
                  Resume
                </button>
              )}
            </td>
          </tr>
        )}
      />
      {draining && (
        <Confirm
          title="Drain this worker?"
          action="Drain worker"
          onClose={() => setDraining(null)}
          onConfirm={() => act(draining, "drain")}
        >
          <p>
            The worker accepts no new jobs. Its current jobs return to the queue, and another worker with the same disk
            resumes them where they stopped.
          </p>
        </Confirm>
      )}
    </>
  );
}
