import { getRouteApi } from "@tanstack/react-router";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { type Job, type Sweep as SweepData, summaryOf } from "../../api/types";
import { formatBytes, formatLoss, plural } from "../../format";
import { LABELS } from "../../labels";
import { Link } from "../../link";
import { nameOf } from "../../names";
import { useStateChanges } from "../../state-changes";
import { announce } from "../../ui/announcer";
import { Failure, Loading, Term, Time, Title } from "../../ui/basics";
import { FINAL_STATES, STATES, StateLabel } from "../../ui/states";
import { Table } from "../../ui/table";
import { JobProgress, VerdictText } from "../job-progress";
import { measuredText } from "../run/verdict";
import { axesText, axisNames, countsText, valueText } from "./axes";

const route = getRouteApi("/sweeps/$id");

/** The runs of a sweep as a table with its axes. */
export default function Sweep() {
  const { id } = route.useParams();
  const query = useQuery(`sweep ${id}`, (signal) => get<SweepData>(`/v1/sweeps/${id}`, {}, signal), {
    everyMs: (read) => (read?.jobs.every(({ state }) => FINAL_STATES.has(state)) ? 30_000 : 3000),
  });
  const sweep = query.data;
  useStateChanges(sweep?.jobs ?? [], (changed) =>
    announce(changed.map((job) => `${nameOf(job)}: ${STATES[job.state].text}`).join(". ")),
  );
  if (!sweep) return query.error ? <Failure error={query.error} retry={query.reload} /> : <Loading />;
  return (
    <>
      <Title>{sweep.name ?? "Sweep"}</Title>
      <p className="row">
        <code>{sweep.id}</code>
        <span className="faint">
          {plural(sweep.total, "run")}: {countsText(sweep.by_state)} · {axesText(sweep.matrix)} ·{" "}
          <Time at={sweep.created_at} />
        </span>
        <Link to="/" search={{ sweep: [id] }}>
          In the list of runs
        </Link>
        {(sweep.by_state.succeeded ?? 0) > 1 && (
          <Link to="/compare" search={{ sweep: [id], state: ["succeeded"] }}>
            Compare
          </Link>
        )}
      </p>
      <SweepTable sweep={sweep} />
    </>
  );
}

function SweepTable({ sweep }: { sweep: SweepData }) {
  const axes = [...axisNames(sweep.matrix)];
  return (
    <Table
      head={
        <>
          {axes.map(([pointer, name]) => (
            <th key={pointer} title={pointer}>
              {name}
            </th>
          ))}
          <th>Run</th>
          <th>State</th>
          <th>Verdict</th>
          <th className="number">Size</th>
          <th className="number">
            <Term>{LABELS.klMean}</Term>
          </th>
          <th className="number">
            <Term>Perplexity vs. original</Term>
          </th>
        </>
      }
    >
      {sweep.jobs.map((job) => (
        <tr key={job.id}>
          {axes.map(([pointer]) => (
            <td key={pointer}>{valueText(job, pointer)}</td>
          ))}
          <td>
            <Link to="/jobs/$id" params={{ id: job.id }} title={job.id}>
              {nameOf(job)}
            </Link>
          </td>
          <td>
            <StateLabel state={job.state} />
          </td>
          <Results job={job} />
        </tr>
      ))}
    </Table>
  );
}

/** What was measured of a run, or its progress. */
function Results({ job }: { job: Job }) {
  const summary = summaryOf(job);
  if (!summary)
    return (
      <td colSpan={4}>
        <JobProgress job={job} />
      </td>
    );
  const kl = { value: summary.kl_mean, stderr: summary.kl_stderr ?? null };
  return (
    <>
      <td>
        <VerdictText job={job} />
      </td>
      <td className="number">{formatBytes(summary.size_after_bytes)}</td>
      <td className="number">{measuredText(kl, 3)}</td>
      <td className="number">{summary.perplexity_ratio == null ? "–" : formatLoss(summary.perplexity_ratio - 1)}</td>
    </>
  );
}
