import { expect, it } from "vitest";
import { heatGrid } from "./heat-cells";
import { METRICS } from "./layers";

const layer = (name: string, block: number, relative_error: number, sqnr_db = 20) => ({
  name,
  block,
  relative_error,
  sqnr_db,
  scheme: "int8",
});
const [ERROR, SQNR, OUTPUT] = METRICS as [(typeof METRICS)[0], (typeof METRICS)[0], (typeof METRICS)[0]];

it("layers are cells by module type and block, as strong as they are bad", () => {
  const grid = heatGrid(
    [
      layer("layers.0.q_proj", 0, 0.1),
      layer("layers.1.q_proj", 1, 0.05),
      layer("layers.0.mlp.experts.0.up_proj", 0, 0.02),
      layer("layers.0.mlp.experts.1.up_proj", 0, 0.04),
    ],
    ERROR,
  );
  expect(grid?.blocks).toEqual([0, 1]);
  expect(grid?.rows.map(({ kind }) => kind)).toEqual(["experts.up_proj", "q_proj"]);
  const [experts, queries] = grid?.rows.map(({ cells }) => cells) ?? [];
  expect(experts).toEqual([{ name: "layers.0.mlp.experts.1.up_proj", text: "4.00 %", share: expect.closeTo(0) }, null]);
  expect(queries?.map((cell) => cell?.share)).toEqual([1, expect.closeTo(1 / 6)]);
  expect([grid?.best, grid?.worst]).toEqual(["4.00 %", "10.00 %"]);
});

it("where more is better, less is stronger, and small differences stay small", () => {
  const grid = heatGrid(
    [layer("layers.0.q", 0, 0.1, 30), layer("layers.1.q", 1, 0.1, 20), layer("layers.2.q", 2, 0.1, 20)],
    SQNR,
  );
  expect(grid?.rows[0]?.cells.map((cell) => cell?.share)).toEqual([0, 1, 1]);
  const alike = heatGrid(
    [layer("layers.0.q", 0, 0.1, 20.1), layer("layers.1.q", 1, 0.1, 20), layer("layers.2.q", 2, 0.1, 20)],
    SQNR,
  );
  expect(alike?.rows[0]?.cells.map((cell) => Math.round(100 * (cell?.share ?? 0)))).toEqual([98, 100, 100]);
});

it("an outlier alone does not make all others look alike", () => {
  const many = Array.from({ length: 100 }, (_, block) => layer(`layers.${block}.q`, block, 0.01 + block / 10_000));
  const grid = heatGrid([...many, layer("layers.100.q", 100, 50)], ERROR);
  expect(grid?.rows[0]?.cells.at(-1)?.share).toBe(1);
  expect(grid?.rows[0]?.cells[50]?.share).toBeCloseTo(0.5, 1);
});

it("without values there is no grid", () => {
  expect(heatGrid([], ERROR)).toBeNull();
  expect(heatGrid([layer("layers.0.q", 0, 0.1)], OUTPUT)).toBeNull();
});
