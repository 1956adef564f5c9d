import type { Job, SweepBrief } from "../../api/types";
import { plural, shortName } from "../../format";
import { Link } from "../../link";
import type { Column } from "./columns";

interface Props {
  job: Job;
  sweep: SweepBrief | undefined;
  columns: Column[];
}

/** The runs of a sweep as one row of the list, which opens into a table with its axes. `job` is the newest of them. */
export function SweepRow({ job, sweep, columns }: Props) {
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
      {columns.map(({ id, head, className, sweepHead, sweepCell }) => (
        <td key={id} className={className} data-label={id === "progress" ? undefined : (sweepHead ?? head)}>
          {sweepCell(sweep, job)}
        </td>
      ))}
    </tr>
  );
}
