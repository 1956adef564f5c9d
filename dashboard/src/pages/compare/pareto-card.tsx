import { useMemo, useState } from "react";
import { type Job, type Measured, summaryOf } from "../../api/types";
import type { Axis } from "../../charts/scale";
import { Scatter, type Series } from "../../charts/scatter";
import { formatBytes, formatPercent, formatShare } from "../../format";
import { scrollable } from "../../ui/basics";
import { halfInterval } from "./change";
import { paretoFront, type Result } from "./pareto";

const asChange = (value: number) => formatPercent(value, 2);
const SIZES: Axis = { format: formatBytes, leastSpan: 0.2 };
const CHANGES: Axis = { format: asChange, formatError: formatShare, fromZero: true };

/** Size against quality. The perplexity is that against the original on the same tokens: its error is a paired one. */
export function ParetoCard({
  jobs,
  names,
  ratios,
}: {
  jobs: Job[];
  names: Map<string, string>;
  ratios: ReadonlyMap<string, Measured>;
}) {
  const [picked, setPicked] = useState<string | null>(null);
  const results = useMemo(
    () => jobs.flatMap((job) => resultOf(job, names.get(job.id) ?? job.id, ratios.get(job.id)?.stderr)),
    [jobs, names, ratios],
  );
  const front = useMemo(() => paretoFront(results), [results]);
  const series = useMemo<Series[]>(
    () =>
      results.map((result, look) => ({
        name: result.name,
        look,
        points: [{ x: result.bytes, y: result.loss, name: result.name, error: halfInterval(result.stderr) }],
      })),
    [results],
  );
  const path = useMemo(() => front.map(({ bytes, loss }) => ({ x: bytes, y: loss })), [front]);
  if (results.length < 2) return null;
  return (
    <section className="card">
      <h2>Size vs. quality</h2>
      <Scatter
        label="Perplexity and size of each run; lower is better for both"
        series={series}
        xLabel="size"
        yLabel="perplexity vs. original"
        xAxis={SIZES}
        yAxis={CHANGES}
        radius={6}
        front={path}
        onPick={setPicked}
        picked={picked}
      />
      <div className="table" ref={scrollable}>
        <table>
          <caption>
            A run is Pareto-optimal if no other run is both smaller and better. ± is half a 95 % interval.
          </caption>
          <thead>
            <tr>
              <th>Run</th>
              <th className="number">Size</th>
              <th className="number">Perplexity vs. original</th>
              <th>Pareto-optimal</th>
            </tr>
          </thead>
          <tbody>
            {results.map((result) => (
              <tr key={result.id}>
                <td className="wrap">{result.name}</td>
                <td className="number">{formatBytes(result.bytes)}</td>
                <td className="number">
                  {asChange(result.loss)}
                  {result.stderr ? ` ± ${formatShare(halfInterval(result.stderr))}` : ""}
                </td>
                <td>{front.includes(result) ? "✓ Yes" : "No"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function resultOf(job: Job, name: string, stderr: number | null | undefined): Result[] {
  const summary = summaryOf(job);
  if (summary?.perplexity_ratio == null) return [];
  const { size_after_bytes: bytes, perplexity_ratio: ratio } = summary;
  return [{ id: job.id, name, bytes, loss: ratio - 1, stderr: stderr ?? undefined }];
}
