import { useMemo, useRef, useState } from "react";
import { NUM_LOOKS } from "../../charts/marks";
import { pngOf } from "../../charts/png";
import type { Axis } from "../../charts/scale";
import { Scatter, type Series } from "../../charts/scatter";
import { saveFile } from "../../download";
import { formatBytes, formatLoss, formatShare, shortName } from "../../format";
import { Link } from "../../link";
import { halfInterval } from "./change";
import type { RunResult } from "./runs-of-view";

const SIZES: Axis = { format: formatBytes, leastSpan: 0.2 };
const CHANGES: Axis = { format: formatLoss, formatError: formatShare, fromZero: true };
const OTHERS = "other";
const MANY = 50; // runs, from which on the marks are smaller

/** Size against quality. The perplexity is that against the original on the same tokens: its error is a paired one. */
export function ParetoCard({ results, fronts }: { results: RunResult[]; fronts: RunResult[][] }) {
  const [picked, setPicked] = useState<string | null>(null);
  const card = useRef<HTMLElement>(null);
  const series = useMemo(() => seriesOf(results), [results]);
  const paths = useMemo(() => fronts.map((front) => front.map(({ bytes, loss }) => ({ x: bytes, y: loss }))), [fronts]);
  const labelled = useMemo(() => new Set(fronts.flat().map(({ name }) => name)), [fronts]);
  const run = results.find(({ name }) => name === picked);
  const save = async () => {
    const chart = card.current?.querySelector<SVGSVGElement>("[role=group] > svg");
    if (chart) saveFile("size-and-quality.png", await pngOf(chart, series));
  };
  if (results.length < 2) return null;
  return (
    <section className="card" ref={card}>
      <div className="row spread">
        <h2>Size vs. quality</h2>
        <button type="button" onClick={() => void save()}>
          Save as PNG
        </button>
      </div>
      <Scatter
        label="Perplexity and size of each run; lower is better for both"
        series={series}
        xLabel="size"
        yLabel="perplexity vs. original"
        xAxis={SIZES}
        yAxis={CHANGES}
        radius={results.length > MANY ? 4 : 6}
        fronts={paths}
        labelled={labelled}
        onPick={setPicked}
        picked={picked}
      />
      <p className="sub">
        Bars are 95 % intervals. The dashed line joins the Pareto-optimal runs of a model, whose names are shown where
        there is room.{" "}
        {run && (
          <Link to="/jobs/$id" params={{ id: run.id }}>
            Open {run.name}
          </Link>
        )}
      </p>
    </section>
  );
}

/** A series for each model, or of one model for each preset. Those beyond the number of looks share the last one. */
function seriesOf(results: RunResult[]): Series[] {
  const isMixed = results.some(({ model }) => model !== results[0]?.model);
  const groupOf = (result: RunResult) => (isMixed ? shortName(result.model) : result.preset);
  const groups = [...new Set(results.map(groupOf))].sort();
  const byName = new Map<string, Series>();
  for (const result of results) {
    const index = groups.indexOf(groupOf(result));
    const isOther = groups.length > NUM_LOOKS && index >= NUM_LOOKS - 1;
    const name = isOther ? OTHERS : groupOf(result);
    const series = byName.get(name) ?? { name, look: isOther ? NUM_LOOKS - 1 : index, points: [] };
    series.points.push({ x: result.bytes, y: result.loss, name: result.name, error: halfInterval(result.stderr) });
    byName.set(name, series);
  }
  return [...byName.values()].sort((a, b) => a.look - b.look);
}
