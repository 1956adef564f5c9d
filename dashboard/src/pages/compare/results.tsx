import { type Job, type Summary, schemeOf, summaryOf } from "../../api/types";
import { formatBytes, formatDuration, formatNumber, formatPercent } from "../../format";
import { LABELS } from "../../labels";
import { scrollable } from "../../ui/basics";

interface Row {
  text: string;
  value: (summary: Summary) => number | null | undefined;
  format: (value: number) => string;
  /** The direction of an improvement. */
  better: "less" | "more";
}

const ROWS: Row[] = [
  { text: "Size", value: (summary) => summary.size_after_bytes, format: formatBytes, better: "less" },
  {
    text: "Perplexity",
    value: (summary) => summary.perplexity_after,
    format: (value) => formatNumber(value, 5),
    better: "less",
  },
  {
    text: "Perplexity vs. original",
    value: (summary) => summary.perplexity_ratio,
    format: (value) => formatPercent(value - 1, 2),
    better: "less",
  },
  {
    text: LABELS.klMean,
    value: (summary) => summary.kl_mean,
    format: (value) => formatNumber(value, 3),
    better: "less",
  },
  {
    text: "Relative weight error, worst layer",
    value: (summary) => summary.worst_layer.relative_error,
    format: (value) => formatPercent(value, 2).slice(1),
    better: "less",
  },
  {
    text: "SQNR (dB), worst layer",
    value: (summary) => summary.worst_layer.sqnr_db,
    format: (value) => formatNumber(value),
    better: "more",
  },
  { text: "Layers quantized", value: (summary) => summary.num_layers_quantized, format: String, better: "more" },
  { text: "Duration", value: (summary) => summary.total_s, format: formatDuration, better: "less" },
  { text: LABELS.peakMemory, value: (summary) => summary.peak_memory_bytes, format: formatBytes, better: "less" },
];

const NOTHING = { worst_layer: {} } as Summary;

/** Each metric and its change from the baseline, marked by sign and word, not by colour alone. */
export function ResultsTable({ jobs, names }: { jobs: Job[]; names: Map<string, string> }) {
  const [first] = jobs;
  const base = first && summaryOf(first);
  return (
    <div className="table" ref={scrollable}>
      <table>
        <caption>Changes are relative to {first && names.get(first.id)}</caption>
        <thead>
          <tr>
            <th>Metric</th>
            {jobs.map((job) => (
              <th key={job.id} className="number">
                {names.get(job.id)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          <tr>
            <th scope="row">Preset</th>
            {jobs.map((job) => (
              <td key={job.id} className="number">
                {schemeOf(job)}
              </td>
            ))}
          </tr>
          {ROWS.filter((row) => jobs.some((job) => row.value(summaryOf(job) ?? NOTHING) != null)).map((row) => (
            <tr key={row.text}>
              <th scope="row">{row.text}</th>
              {jobs.map((job) => {
                const summary = summaryOf(job);
                return (
                  <Cell
                    key={job.id}
                    row={row}
                    value={summary && row.value(summary)}
                    base={base && row.value(base)}
                    isBase={job === first}
                  />
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Cell({
  row,
  value,
  base,
  isBase,
}: {
  row: Row;
  value: number | null | undefined;
  base: number | null | undefined;
  isBase: boolean;
}) {
  if (value == null) return <td className="number">–</td>;
  const change = base && !isBase ? value / base - 1 : 0;
  const isBetter = row.better === "less" ? change < 0 : change > 0;
  return (
    <td className="number">
      {row.format(value)}
      {Math.abs(change) > 5e-4 && (
        <div className={`sub ${isBetter ? "good" : "bad"}`}>
          {formatPercent(change, Math.abs(change) < 0.1 ? 2 : 0)} {isBetter ? "better" : "worse"}
        </div>
      )}
    </td>
  );
}
