import type { Job, SweepBrief } from "../../api/types";
import { formatBytes, formatNumber, plural, shortName } from "../../format";
import { Link } from "../../link";
import { OriginCells, VerdictLevel } from "../job-progress";
import { axesText, countsText } from "../sweeps/axes";

/** The runs of a sweep as one row of the list, which opens into a table with its axes. `job` is the newest of them. */
export function SweepRow({ job, sweep }: { job: Job; sweep: SweepBrief | undefined }) {
  const best = sweep?.best;
  return (
    <tr>
      <td className="check" />
      <td className="name">
        <div>
          <Link to="/sweeps/$id" params={{ id: job.sweep_id ?? "" }} title={job.sweep_id ?? undefined}>
            {sweep?.name ?? "Sweep"}
          </Link>
        </div>
        <div className="sub">
          {sweep && plural(sweep.total, "run")}
          {sweep?.model && ` of ${shortName(sweep.model)}`}
        </div>
      </td>
      <td data-label="Axes">{sweep && axesText(sweep.axes)}</td>
      <td data-label="States">{sweep && countsText(sweep.by_state)}</td>
      <td data-label="Best result">{best?.verdict ? <VerdictLevel level={best.verdict} /> : "–"}</td>
      <td className="progress" />
      <td className="number" data-label="Best size">
        {best ? formatBytes(best.size_after_bytes) : "–"}
      </td>
      <td className="number" data-label="Divergence">
        {best?.kl_mean == null ? "–" : `KL ${formatNumber(best.kl_mean, 3)}`}
      </td>
      <OriginCells job={job} />
    </tr>
  );
}
