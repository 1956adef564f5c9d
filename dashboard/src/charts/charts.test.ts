import { expect, it } from "vitest";
import { formatBytes, formatLoss } from "../format";
import { placeLabels } from "./labels";
import { byBadness, kindOf, METRICS, mostTelling, outliers, seriesByKind } from "./layers";
import { marksPath } from "./marks";
import { distinctTicks, linear, niceTicks, rangeOf } from "./scale";

const PLAIN = { format: String };

it("ticks are round and cover the range", () => {
  expect(niceTicks(0, 1)).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
  expect(niceTicks(2.6, 2.68, 4)).toEqual([2.6, 2.62, 2.64, 2.66, 2.68]);
  expect(niceTicks(3, 3)).toEqual([3]);
  expect(niceTicks(-0.1, 2.1, 10, 1)).toEqual([0, 1, 2]); // blocks are counted
});

it("a scale leaves room at both ends, also around one value", () => {
  const scale = linear([10, 20], 0, 100, PLAIN);
  expect(scale(15)).toBeCloseTo(50);
  expect(scale(10)).toBeGreaterThan(0);
  expect(scale(20)).toBeLessThan(100);
  expect(linear([7], 0, 100, PLAIN)(7)).toBeCloseTo(50);
  expect(Number.isFinite(linear([], 0, 100, PLAIN)(0.5))).toBe(true);
});

it("an axis with a span stays as it is while values arrive", () => {
  const blocks = { ...PLAIN, span: [0, 29] as [number, number] };
  expect(linear([0, 1], 0, 100, blocks)(10)).toBe(linear([0, 1, 2, 17], 0, 100, blocks)(10));
  expect(linear([0, 1], 0, 100, blocks)(29)).toBeLessThan(100);
});

it("no two ticks have the same text", () => {
  const texts = (low: number, high: number) =>
    distinctTicks(low, high, { format: formatBytes }).map(({ text }) => text);
  for (const [low, high] of [
    [799.6e6, 800.4e6],
    [825e6, 826e6],
    [0, 826e6],
    [7, 7],
  ] as const) {
    expect(new Set(texts(low, high)).size).toBe(texts(low, high).length);
  }
  expect(texts(0, 826e6)).toEqual(["0 B", "200 MB", "400 MB", "600 MB", "800 MB"]);
});

it("ticks have no decimals if all of theirs are zeros", () => {
  const texts = (high: number, format: (value: number) => string) =>
    distinctTicks(0, high, { format, numTicks: 4 }).map(({ text }) => text);
  expect(texts(1.6, formatLoss)).toEqual(["±0 %", "+50 %", "+100 %", "+150 %"]);
  expect(texts(0.016, formatLoss)).toEqual(["±0.00 %", "+0.50 %", "+1.00 %", "+1.50 %"]);
  expect(texts(3000, (value) => value.toLocaleString("de"))).toEqual(["0", "1.000", "2.000", "3.000"]);
});

it("an axis does not magnify noise", () => {
  expect(rangeOf([0.0263, 0.0267], { fromZero: true })[0]).toBe(0);
  const [low, high] = rangeOf([30, 30.1], { leastSpan: 0.3 });
  expect(high - low).toBeGreaterThan(9);
  expect(rangeOf([-1, 2], { fromZero: true })[0]).toBeLessThan(-1); // what lies below zero is shown
  expect(rangeOf([0, 0], { fromZero: true })).toEqual([0, 0.05]);
});

it("judges layers by their outputs where these were measured, else by their weights", () => {
  const seen = { ...layer("layers.0.v", 0, 0.01, 40), output_error: 0.08 };
  expect(mostTelling([layer("layers.0.o", 0, 0.13, 17), seen]).id).toBe("output_error");
  expect(mostTelling([layer("layers.0.o", 0, 0.13, 17)]).id).toBe("relative_error");
});

it("names the layers that are far worse than the others", () => {
  const many = Array.from({ length: 20 }, (_, index) => layer(`layers.${index}.a`, index, 0.1 + index / 1000, 20));
  expect(outliers(many, METRICS[0])).toEqual([]);
  const bad = layer("layers.20.down", 20, 0.9, 1);
  expect(outliers([...many, bad], METRICS[0])).toEqual([bad]);
  expect(outliers([...many, bad], METRICS[1] as (typeof METRICS)[0])).toEqual([bad]);
  expect(outliers([bad], METRICS[0])).toEqual([]);
});

const layer = (name: string, block: number, relative_error: number, sqnr_db: number) => ({
  name,
  block,
  relative_error,
  sqnr_db,
  scheme: "int8",
});
const LAYERS = [
  layer("model.layers.0.self_attn.q_proj", 0, 0.1, 20),
  layer("model.layers.1.self_attn.q_proj", 1, 0.3, 10),
  layer("model.layers.0.mlp.experts.7.up_proj", 0, 0.2, 14),
];

it("layers of one kind are one series along the blocks", () => {
  expect(kindOf("model.layers.0.mlp.experts.7.up_proj")).toBe("experts.up_proj");
  const series = seriesByKind(LAYERS, METRICS[0]);
  expect(series.map((each) => [each.name, each.points.map((point) => point.x)])).toEqual([
    ["experts.up_proj", [0]],
    ["q_proj", [0, 1]],
  ]);
  expect(seriesByKind(LAYERS, METRICS[2] as (typeof METRICS)[0])).toEqual([]); // nothing looked at outputs
});

it("more kinds than looks share the last one", () => {
  const many = Array.from({ length: 20 }, (_, index) =>
    layer(`layers.0.kind${String(index).padStart(2, "0")}`, 0, 0.1, 20),
  );
  const series = seriesByKind(many, METRICS[0]);
  expect(series).toHaveLength(8);
  expect(series.at(-1)).toMatchObject({ name: "other" });
  expect(series.flatMap((each) => each.points)).toHaveLength(20);
});

it("the worst layer is first, whichever way the measure goes", () => {
  for (const metric of METRICS.slice(0, 2)) expect(byBadness(LAYERS, metric)[0]?.block).toBe(1);
});

it("all marks of a series are one path", () => {
  expect(
    marksPath(
      [
        { x: 1, y: 2 },
        { x: 3, y: 4 },
      ],
      1,
      2,
    ).match(/M/g),
  ).toHaveLength(2);
});

it("labels stay in the chart and do not cover each other; the first ones have the first place", () => {
  const at = (x: number, y: number, text = "a name") => ({ x, y, text });
  const [label] = placeLabels([at(450, 100)], 70, 900, 260);
  expect(label).toMatchObject({ anchor: "end", text: "a name" });
  expect(label?.x).toBeLessThan(450);
  expect(label?.y).toBeGreaterThan(100); // where no point is both smaller and better
  expect(placeLabels([at(90, 100)], 70, 900, 260)[0]?.anchor).toBe("start"); // no room at the left
  expect(placeLabels([at(450, 255)], 70, 900, 260)[0]?.y).toBeLessThan(260); // the numbers of the axis are below
  expect(placeLabels([at(90, 100)], 70, 110, 260)).toEqual([]);
  const crowd = Array.from({ length: 100 }, (_, index) => at(450, 100, `run ${index}`));
  const placed = placeLabels(crowd, 70, 900, 260);
  expect(placed[0]?.text).toBe("run 0");
  expect(placed.length).toBeGreaterThan(1);
  expect(placed.length).toBeLessThan(8);
  const rows = placed.map(({ y, anchor }) => `${y} ${anchor}`);
  expect(new Set(rows).size).toBe(rows.length);
  expect(placeLabels([at(100, 100, "W".repeat(80))], 70, 900, 260)[0]?.text).toHaveLength(28);
});
