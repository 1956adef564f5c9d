import { useMemo, useState } from "react";
import type { Job, Layer } from "../../api/types";
import { COUNTS, kindOf, METRICS, type Metric, metricValue } from "../../charts/layers";
import { Scatter, type Series } from "../../charts/scatter";
import { plural } from "../../format";
import { Pending } from "../../ui/basics";
import { Table } from "../../ui/table";
import { MAX_OVERLAID, useChangeView, type View } from "./address";
import { useLayers } from "./read-runs";

interface Run {
  job: Job;
  layers: Layer[];
}

const ROWS = 30;

type Names = ReadonlyMap<string, string>;

/** The layers of the chosen runs in one chart, and a table of those that differ most. */
export function LayersOverlay({
  jobs,
  numRuns,
  names,
  view,
}: {
  jobs: Job[];
  numRuns: number;
  names: Names;
  view: View;
}) {
  const query = useLayers(jobs);
  return (
    <section className="card">
      <h2>Layer comparison</h2>
      <p className="hint">
        {jobs.length} of {plural(numRuns, "run")}. Choose up to {MAX_OVERLAID} by ticking “Layers” in the table above.
      </p>
      <Pending query={query} />
      {query.data && query.data.length > 0 && <Overlay runs={query.data} names={names} view={view} />}
    </section>
  );
}

function Overlay({ runs, names, view: { metric: metricId, kind } }: { runs: Run[]; names: Names; view: View }) {
  const changeView = useChangeView();
  const [picked, setPicked] = useState<string | null>(null);
  const metric = METRICS.find((each) => each.id === metricId) ?? METRICS[0];
  const kinds = useMemo(
    () => [...new Set(runs.flatMap((run) => run.layers.map((layer) => kindOf(layer.name))))].sort(),
    [runs],
  );
  const series = useMemo(() => overlay(runs, names, metric, kind), [runs, names, metric, kind]);
  return (
    <>
      <div className="row">
        <select aria-label="Metric" value={metric.id} onChange={(event) => changeView({ metric: event.target.value })}>
          {METRICS.map((each) => (
            <option key={each.id} value={each.id}>
              {each.text}
            </option>
          ))}
        </select>
        <select
          aria-label="Module type"
          value={kind}
          onChange={(event) => changeView({ kind: event.target.value || undefined })}
        >
          <option value="">All modules</option>
          {kinds.map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </div>
      <Scatter
        label={`${metric.text} of each layer in ${plural(runs.length, "run")}`}
        series={series}
        xLabel="layer, in model order"
        yLabel={metric.text}
        xAxis={COUNTS}
        yAxis={metric.axis}
        joined
        radius={2.5}
        onPick={setPicked}
        picked={picked}
      />
      <details>
        <summary>Layers with the largest differences</summary>
        <Differing runs={runs} names={names} metric={metric} />
      </details>
    </>
  );
}

function overlay(runs: Run[], names: Names, metric: Metric, kind: string): Series[] {
  const order = new Map<string, number>();
  for (const { layers } of runs) {
    for (const layer of layers) if (!order.has(layer.name)) order.set(layer.name, order.size);
  }
  return runs.map(({ job, layers }, look) => {
    const label = names.get(job.id) ?? job.id;
    const points = layers.flatMap((layer) => {
      const y = metricValue(layer, metric);
      if (y === null || (kind && kindOf(layer.name) !== kind)) return [];
      return [{ x: (order.get(layer.name) ?? 0) + 1, y, name: `${label} ${layer.name}` }];
    });
    return { name: label, look, points: points.sort((a, b) => a.x - b.x) };
  });
}

function Differing({ runs, names, metric }: { runs: Run[]; names: Names; metric: Metric }) {
  const rows = useMemo(() => {
    const byName = new Map<string, (number | null)[]>();
    runs.forEach(({ layers }, index) => {
      for (const layer of layers) {
        const row = byName.get(layer.name) ?? runs.map(() => null);
        row[index] = metricValue(layer, metric);
        byName.set(layer.name, row);
      }
    });
    const spread = (row: (number | null)[]) => {
      const values = row.filter((value) => value !== null);
      return values.length > 1 ? Math.max(...values) - Math.min(...values) : 0;
    };
    return [...byName].sort(([, a], [, b]) => spread(b) - spread(a)).slice(0, ROWS);
  }, [runs, metric]);
  return (
    <Table
      caption={metric.text}
      head={
        <>
          <th>Layer</th>
          {runs.map(({ job }) => (
            <th key={job.id} className="number">
              {names.get(job.id)}
            </th>
          ))}
        </>
      }
    >
      {rows.map(([name, values]) => (
        <tr key={name}>
          <td>
            <code>{name}</code>
          </td>
          {values.map((value, index) => (
            <td key={runs[index]?.job.id} className="number">
              {value === null ? "–" : metric.format(value)}
            </td>
          ))}
        </tr>
      ))}
    </Table>
  );
}
