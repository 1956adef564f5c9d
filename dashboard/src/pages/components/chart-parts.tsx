import { useState } from "react";
import { heatGrid } from "../../charts/heat-cells";
import { Heatmap } from "../../charts/heatmap";
import { Histogram } from "../../charts/histogram";
import { COUNTS, METRICS } from "../../charts/layers";
import { Mark, NUM_LOOKS } from "../../charts/marks";
import type { Axis } from "../../charts/scale";
import { type Point, Scatter, type Series } from "../../charts/scatter";
import { formatBytes, formatShare } from "../../format";
import { Part } from "./part";
import { HOSTILE, ONE_WORD } from "./samples";

const ERRORS: Axis = { format: formatShare, fromZero: true };
const BYTES: Axis = { format: formatBytes, leastSpan: 0.2 };
const LIMIT = { y: 0.05, text: "limit" };

const wave = (series: number, count: number): Point[] =>
  Array.from({ length: count }, (_, x) => ({
    x,
    y: 0.03 + 0.01 * Math.sin(x / 3 + series),
    name: `layer ${series}.${x}`,
  }));
const named = (name: string, look: number, points: Point[]): Series => ({ name, look, points });

const KINDS = Array.from({ length: NUM_LOOKS }, (_, look) => named(`kind ${look + 1}`, look, wave(look, 30)));
const ONE_SERIES = [named("error", 0, wave(0, 30))];
const HOSTILE_SERIES = [named(HOSTILE, 0, wave(0, 5)), named(ONE_WORD, 1, wave(1, 5))];
const RUNS = [90, 120, 180].map((size, look) =>
  named(`run ${look + 1}`, look, [{ x: size * 1e6, y: 0.04 / (look + 1), name: `run ${look + 1}`, error: 0.004 }]),
);
const FRONTS = [RUNS.flatMap(({ points }) => points)];
const LABELLED = new Set(RUNS.map(({ name }) => name));

const COUNTED = Array.from({ length: 21 }, (_, part) => Math.round(90_000 * Math.exp(-((part - 10) ** 2) / 6)));

const layersOf = (kinds: string[], numBlocks: number) =>
  kinds.flatMap((kind, row) =>
    Array.from({ length: numBlocks }, (_, block) => ({
      name: `layers.${block}.${kind}`,
      block,
      relative_error: 0.03 + 0.01 * row + 0.001 * block,
      sqnr_db: 20,
      scheme: "int8",
    })),
  );

export function ChartParts() {
  return (
    <>
      <Part name="Mark">
        <div className="legend">
          {KINDS.map(({ look }) => (
            <Mark key={look} look={look} />
          ))}
        </div>
      </Part>
      <Part name="Histogram">
        <Histogram label="Weights of layers.0.q_proj" largest={0.84} counts={COUNTED} />
      </Part>
      <Chart name="Scatter, every look" series={KINDS} />
      <Chart name="Scatter, joined, with a limit and a point picked" series={ONE_SERIES} isJoined picked="layer 0.7" />
      <Chart name="Scatter, error bars and front" series={RUNS} xAxis={BYTES} fronts={FRONTS} labelled={LABELLED} />
      <Chart name="Scatter, empty" series={[]} />
      <Chart name="Scatter, one point" series={[named("error", 0, wave(0, 1))]} />
      <Chart name="Scatter, narrow and hostile" series={HOSTILE_SERIES} isNarrow />
      <HeatChart
        name="Heatmap, a layer picked"
        kinds={["q_proj", "down_proj"]}
        numBlocks={12}
        picked="layers.3.q_proj"
      />
      <HeatChart name="Heatmap, narrow and hostile" kinds={[HOSTILE, ONE_WORD]} numBlocks={60} isNarrow />
    </>
  );
}

function HeatChart({
  name,
  kinds,
  numBlocks,
  isNarrow = false,
  picked: first = null,
}: {
  name: string;
  kinds: string[];
  numBlocks: number;
  isNarrow?: boolean;
  picked?: string | null;
}) {
  const [picked, setPicked] = useState<string | null>(first);
  const grid = heatGrid(layersOf(kinds, numBlocks), METRICS[0]);
  return (
    <Part name={name} isNarrow={isNarrow}>
      {grid && <Heatmap label={`Chart: ${name}`} grid={grid} onPick={setPicked} picked={picked} />}
    </Part>
  );
}

function Chart({
  name,
  series,
  xAxis = COUNTS,
  fronts,
  labelled,
  isJoined = false,
  isNarrow = false,
  picked: first = null,
}: {
  name: string;
  series: Series[];
  xAxis?: Axis;
  fronts?: { x: number; y: number }[][];
  labelled?: ReadonlySet<string>;
  isJoined?: boolean;
  isNarrow?: boolean;
  picked?: string | null;
}) {
  const [picked, setPicked] = useState<string | null>(first);
  return (
    <Part name={name} isNarrow={isNarrow}>
      <Scatter
        label={`Chart: ${name}`}
        series={series}
        xLabel={xAxis === BYTES ? "size" : "block"}
        yLabel="relative error"
        xAxis={xAxis}
        yAxis={ERRORS}
        limit={isJoined ? LIMIT : undefined}
        joined={isJoined}
        fronts={fronts}
        labelled={labelled}
        onPick={setPicked}
        picked={picked}
      />
    </Part>
  );
}
