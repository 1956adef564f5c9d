import { useMemo, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { type Job, type Report, summaryOf } from "../../api/types";
import { Scatter, type Series } from "../../charts/scatter";
import { formatBytes, formatNumber } from "../../format";
import { paretoFront, type Result } from "./pareto";

export function ParetoCard({ jobs, names }: { jobs: Job[]; names: Map<string, string> }) {
  const [picked, setPicked] = useState<string | null>(null);
  const done = jobs.filter((job) => job.artifact);
  const errors = useQuery(`errors ${done.map((job) => job.id).join()}`, async (signal) => {
    const entries = await Promise.all(done.map(async (job) => [job.id, await readStderr(job.id, signal)] as const));
    return new Map(entries);
  });
  const results = useMemo(
    () => jobs.flatMap((job) => resultOf(job, names.get(job.id) ?? job.id, errors.data?.get(job.id))),
    [jobs, names, errors.data],
  );
  const front = useMemo(() => paretoFront(results), [results]);
  const series = useMemo<Series[]>(
    () =>
      results.map((result, look) => ({
        name: result.name,
        look,
        points: [{ x: result.bytes, y: result.loss, name: result.name, error: result.stderr }],
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
        yLabel="perplexity"
        formatX={formatBytes}
        formatY={(value) => formatNumber(value)}
        radius={6}
        front={path}
        onPick={setPicked}
        picked={picked}
      />
      <table>
        <caption>A run is Pareto-optimal if no other run is both smaller and better.</caption>
        <thead>
          <tr>
            <th>Run</th>
            <th className="number">Size</th>
            <th className="number">Perplexity</th>
            <th>Pareto-optimal</th>
          </tr>
        </thead>
        <tbody>
          {results.map((result) => (
            <tr key={result.id}>
              <td>{result.name}</td>
              <td className="number">{formatBytes(result.bytes)}</td>
              <td className="number">
                {formatNumber(result.loss, 5)}
                {result.stderr ? ` ± ${formatNumber(result.stderr, 2)}` : ""}
              </td>
              <td>{front.includes(result) ? "✓ Yes" : "No"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** One standard error of the perplexity, from the report; undefined if it was not measured. */
async function readStderr(id: string, signal: AbortSignal): Promise<number | undefined> {
  const report = await get<Report>(`/v1/jobs/${id}/artifacts/report.json`, {}, signal);
  return report.quality?.after.token_perplexity.stderr ?? undefined;
}

function resultOf(job: Job, name: string, stderr: number | undefined): Result[] {
  const summary = summaryOf(job);
  if (summary?.perplexity_after == null) return [];
  return [{ id: job.id, name, bytes: summary.size_after_bytes, loss: summary.perplexity_after, stderr }];
}
