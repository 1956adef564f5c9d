// The layers of a model as a grid: module types by blocks, each cell as strong as its layer is bad.
import type { Layer } from "../api/types";
import { byBadness, kindOf, type Metric, metricValue } from "./layers";

export interface HeatCell {
  /** The worst layer of the cell: the experts of a block share one. */
  name: string;
  text: string;
  /** 0 for the best value of the grid, 1 for a value that few exceed. */
  share: number;
}

export interface HeatGrid {
  /** By module type, the cell of each block; null where a block has no such layer. */
  rows: { kind: string; cells: (HeatCell | null)[] }[];
  blocks: number[];
  best: string;
  worst: string;
}

const LEAST_SPAN = 0.3; // of the worst value: small differences must not look large
const MOST = 0.98; // share of the cells within the scale: an outlier alone must not make all others look alike

/** The grid of the layers that have a value; null if there is none. */
export function heatGrid(layers: Layer[], metric: Metric): HeatGrid | null {
  const badness = (layer: Layer) => (metric.up ? -1 : 1) * (metricValue(layer, metric) ?? 0);
  const worst = new Map<string, Layer>();
  for (const layer of byBadness(layers, metric)) {
    const place = `${layer.block} ${kindOf(layer.name)}`;
    if (metricValue(layer, metric) !== null && !worst.has(place)) worst.set(place, layer);
  }
  const shown = [...worst.values()];
  if (!shown.length) return null;
  const values = shown.map(badness).sort((a, b) => a - b);
  const high = values[Math.ceil(MOST * (values.length - 1))] as number;
  const low = Math.min(values[0] as number, high - LEAST_SPAN * Math.abs(high));
  const cellOf = (layer: Layer): HeatCell => ({
    name: layer.name,
    text: metric.format(metricValue(layer, metric) ?? 0),
    share: high > low ? Math.min(1, Math.max(0, (badness(layer) - low) / (high - low))) : 0,
  });
  const blocks = [...new Set(shown.map(({ block }) => block))].sort((a, b) => a - b);
  const kinds = [...new Set(shown.map(({ name }) => kindOf(name)))].sort();
  const rows = kinds.map((kind) => ({
    kind,
    cells: blocks.map((block) => {
      const layer = worst.get(`${block} ${kind}`);
      return layer ? cellOf(layer) : null;
    }),
  }));
  const asText = (bad: number) => metric.format(metric.up ? -bad : bad);
  return { rows, blocks, best: asText(low), worst: asText(high) };
}
