// The columns of the list of runs. Which of them it shows is in the address, as is its order.
import { useNavigate } from "@tanstack/react-router";
import type { ReactNode } from "react";
import { type Job, type SweepBrief, schemeOf, summaryOf } from "../../api/types";
import { formatBytes, formatNumber } from "../../format";
import { OPERATOR } from "../../labels";
import type { RunsSearch } from "../../search";
import { Time } from "../../ui/basics";
import { StateLabel } from "../../ui/states";
import { JobProgress, PerplexityChange, SizeChange, VerdictLevel, VerdictText } from "../job-progress";
import { axesText, countsText } from "../sweeps/axes";

export interface Column {
  id: string;
  head: string;
  className?: string;
  /** The order of the service that sorts by it. */
  order?: string;
  isOptional?: boolean;
  cell: (job: Job) => ReactNode;
  /** The cell of a sweep, and its name; the run is the newest of the sweep. */
  sweepHead?: string;
  sweepCell: (sweep: SweepBrief | undefined, newest: Job) => ReactNode;
}

const kl = (value: number | null | undefined) => (value == null ? "–" : formatNumber(value, 3));
const owner = (job: Job) => job.submitted_by?.name ?? OPERATOR;
const created = (job: Job) => <Time at={job.created_at} />;

export const COLUMNS: Column[] = [
  {
    id: "preset",
    head: "Preset",
    cell: schemeOf,
    sweepHead: "Axes",
    sweepCell: (sweep) => sweep && axesText(sweep.axes),
  },
  {
    id: "state",
    head: "State",
    cell: (job) => <StateLabel state={job.state} />,
    sweepHead: "States",
    sweepCell: (sweep) => sweep && countsText(sweep.by_state),
  },
  {
    id: "verdict",
    head: "Verdict",
    cell: (job) => <VerdictText job={job} />,
    sweepHead: "Best result",
    sweepCell: (sweep) => (sweep?.best?.verdict ? <VerdictLevel level={sweep.best.verdict} /> : "–"),
  },
  {
    id: "progress",
    head: "Progress",
    className: "progress",
    cell: (job) => <JobProgress job={job} />,
    sweepCell: () => null,
  },
  {
    id: "size",
    head: "Size",
    className: "number",
    order: "size",
    cell: (job) => <SizeChange job={job} />,
    sweepHead: "Best size",
    sweepCell: (sweep) => (sweep?.best ? formatBytes(sweep.best.size_after_bytes) : "–"),
  },
  {
    id: "perplexity",
    head: "Perplexity",
    className: "number",
    order: "perplexity",
    cell: (job) => <PerplexityChange job={job} />,
    sweepHead: "Divergence",
    sweepCell: (sweep) => (sweep?.best?.kl_mean == null ? "–" : `KL ${kl(sweep.best.kl_mean)}`),
  },
  {
    id: "kl",
    head: "KL divergence",
    className: "number",
    order: "kl",
    isOptional: true,
    cell: (job) => kl(summaryOf(job)?.kl_mean),
    sweepCell: (sweep) => kl(sweep?.best?.kl_mean),
  },
  { id: "owner", head: "Owner", cell: owner, sweepCell: (_, newest) => owner(newest) },
  {
    id: "created",
    head: "Created",
    className: "nowrap",
    order: "oldest",
    cell: created,
    sweepCell: (_, newest) => created(newest),
  },
];

/** The columns that an address names, or the usual ones. */
export function columnsOf({ column }: RunsSearch): Column[] {
  const named = COLUMNS.filter(({ id }) => column?.includes(id));
  return named.length ? named : COLUMNS.filter(({ isOptional }) => !isOptional);
}

export const ORDERS = [
  { id: undefined, text: "Newest first" },
  { id: "oldest", text: "Oldest first" },
  { id: "size", text: "By size" },
  { id: "kl", text: "By KL divergence" },
  { id: "perplexity", text: "By perplexity" },
];

/** The order of an address, if the list has it. */
export const orderOf = ({ order }: RunsSearch) => ORDERS.find(({ id }) => id === order)?.id;

export function ViewFields({ search }: { search: RunsSearch }) {
  const navigate = useNavigate({ from: "/" });
  const shown = columnsOf(search);
  const order = orderOf(search);
  const change = (view: Partial<RunsSearch>) =>
    void navigate({ search: { ...search, ...view, cursor: undefined }, replace: true });
  const toggle = (column: Column) => {
    const next = COLUMNS.filter((each) => (each === column) !== shown.includes(each)).map(({ id }) => id);
    const isUsual = COLUMNS.every((each) => next.includes(each.id) === !each.isOptional);
    change({ column: isUsual ? undefined : next });
  };
  return (
    <>
      <select
        aria-label="Order"
        value={order ?? ""}
        onChange={(event) => change({ order: event.target.value || undefined })}
      >
        {ORDERS.map(({ id, text }) => (
          <option key={text} value={id ?? ""}>
            {text}
          </option>
        ))}
      </select>
      <details className="columns">
        <summary>Columns</summary>
        <fieldset>
          <legend className="hidden">Columns</legend>
          {COLUMNS.map((column) => (
            <label key={column.id}>
              <input
                type="checkbox"
                checked={shown.includes(column)}
                disabled={shown.length === 1 && shown.includes(column)}
                onChange={() => toggle(column)}
              />
              {column.head}
            </label>
          ))}
        </fieldset>
      </details>
    </>
  );
}
