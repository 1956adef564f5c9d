import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { LocalRun, LocalRunList } from "../../api/types";
import { formatBytes, shortName } from "../../format";
import { useSession } from "../../sign-in";
import { Time } from "../../ui/basics";
import { Table } from "../../ui/table";
import { VerdictLevel } from "../job-progress";

const EVERY_MS = 10_000;

/** What the command line made on this machine. Only the service of `bitfoundry up` has it, for operators. */
export function LocalRuns() {
  const isOperator = useSession().can("operator");
  const query = useQuery(
    isOperator ? "local runs" : null,
    (signal) => get<LocalRunList>("/v1/local-runs", {}, signal),
    { everyMs: EVERY_MS },
  );
  if (!query.data?.total) return null;
  const { data, total } = query.data;
  return (
    <section aria-labelledby="local-runs">
      <h2 id="local-runs">Made by the command line on this machine</h2>
      <Table head={HEAD}>{data.map(row)}</Table>
      {total > data.length && (
        <p className="faint">
          The newest {data.length} of {total}. <code>bitfoundry list</code> shows all.
        </p>
      )}
    </section>
  );
}

const HEAD = (
  <>
    <th>Run</th>
    <th>Scheme</th>
    <th>Verdict</th>
    <th className="number">Size</th>
    <th>Created</th>
  </>
);

const row = (run: LocalRun) => (
  <tr key={run.id}>
    <td className="name">
      <a href={`/v1/local-runs/${run.id}/report`} target="_blank" rel="noreferrer">
        {run.name}
      </a>
      <div className="sub" title={run.folder}>
        {shortName(run.model)}
      </div>
    </td>
    <td>{run.config}</td>
    <td>{run.verdict ? <VerdictLevel level={run.verdict} /> : "not measured"}</td>
    <td className="number">{formatBytes(run.size_bytes)}</td>
    <td>
      <Time at={run.created_at} />
    </td>
  </tr>
);
