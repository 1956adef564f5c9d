// Layer metrics as series of a chart.
import type { Layer } from "../api/types";
import { formatNumber, formatShare } from "../format";
import { NUM_LOOKS } from "./marks";
import type { Axis } from "./scale";
import type { Series } from "./scatter";

export interface Metric {
  id: "sqnr_db" | "relative_error" | "output_error";
  text: string;
  format: (value: number) => string;
  axis: Axis;
  /** Whether a higher value is better. */
  up: boolean;
}

const asDecibels = (value: number) => formatNumber(value, 4);
const SHARES: Axis = { format: formatShare, fromZero: true };
const DECIBELS: Axis = { format: asDecibels, leastSpan: 0.3 };

export const METRICS: [Metric, ...Metric[]] = [
  { id: "relative_error", text: "Relative weight error", format: formatShare, axis: SHARES, up: false },
  { id: "sqnr_db", text: "SQNR (dB)", format: asDecibels, axis: DECIBELS, up: true },
  { id: "output_error", text: "Relative output error", format: formatShare, axis: SHARES, up: false },
];

/** The metric that says which layers hurt: the error of their outputs, and that of weights where no output was seen. */
export const mostTelling = (layers: Layer[]): Metric => {
  const outputs = METRICS.find((metric) => metric.id === "output_error");
  return outputs && layers.some((layer) => metricValue(layer, outputs) !== null) ? outputs : METRICS[0];
};

/** Axes of blocks and layers. */
export const COUNTS: Axis = { format: (value) => formatNumber(value), counted: true };

export const metricValue = (layer: Layer, metric: Metric) => layer[metric.id] ?? null;

/** The module type, compared across blocks: q_proj of model.layers.3.self_attn.q_proj. Experts share one type. */
export const kindOf = (name: string) => {
  const parts = name.split(".");
  const last = parts.at(-1) ?? name;
  return parts.includes("experts") ? `experts.${last}` : last;
};

/** One series per module type, along the blocks. Types beyond the number of marker styles share the last one. */
export function seriesByKind(layers: Layer[], metric: Metric): Series[] {
  const byName = new Map<string, Series>();
  const kinds = [...new Set(layers.map((layer) => kindOf(layer.name)))].sort();
  for (const layer of layers) {
    const y = metricValue(layer, metric);
    if (y === null) continue;
    const index = kinds.indexOf(kindOf(layer.name));
    const name = index >= NUM_LOOKS - 1 && kinds.length > NUM_LOOKS ? "other" : (kinds[index] as string);
    const series = byName.get(name) ?? { name, look: Math.min(index, NUM_LOOKS - 1), points: [] };
    series.points.push({ x: layer.block, y, name: layer.name });
    byName.set(name, series);
  }
  return [...byName.values()].sort((a, b) => a.look - b.look);
}

/** The layers sorted by a metric, worst first. */
export function byBadness(layers: Layer[], metric: Metric): Layer[] {
  const bad = (layer: Layer) =>
    (metricValue(layer, metric) ?? (metric.up ? Infinity : -Infinity)) * (metric.up ? -1 : 1);
  return [...layers].sort((a, b) => bad(b) - bad(a));
}

/** "3 of 210 by relative output error": the place of a layer, the worst first. */
export function rankText(layer: Layer, layers: Layer[]): string {
  const metric = mostTelling(layers);
  const place = byBadness(layers, metric).findIndex(({ name }) => name === layer.name) + 1;
  return `${place} of ${layers.length} by ${metric.text.toLowerCase()}`;
}

const FAR = 3; // interquartile ranges beyond the quartile: Tukey's "far out"
const ENOUGH = 8; // layers, for quartiles that mean something

/** The layers far worse than the others by a metric, worst first. */
export function outliers(layers: Layer[], metric: Metric): Layer[] {
  const sign = metric.up ? -1 : 1;
  const bad = layers.flatMap((layer) => {
    const value = metricValue(layer, metric);
    return value === null ? [] : [{ layer, value: sign * value }];
  });
  if (bad.length < ENOUGH) return [];
  bad.sort((a, b) => b.value - a.value);
  const quartile = (share: number) => bad[Math.floor(share * (bad.length - 1))]?.value ?? 0;
  const limit = quartile(0.25) + FAR * (quartile(0.25) - quartile(0.75));
  return bad.filter(({ value }) => value > limit).map(({ layer }) => layer);
}
