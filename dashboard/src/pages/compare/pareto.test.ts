import { expect, it } from "vitest";
import { paretoFront, paretoFronts } from "./pareto";

const run = (id: string, bytes: number, loss: number) => ({ id, name: id, bytes, loss });

it("keeps what no other run beats in both", () => {
  const front = paretoFront([
    run("big", 8, 10),
    run("worse", 8, 11),
    run("small", 2, 14),
    run("beaten", 4, 15),
    run("middle", 4, 12),
  ]);
  expect(front.map((each) => each.id)).toEqual(["small", "middle", "big"]);
});

it("of equals one is enough", () => {
  expect(paretoFront([run("a", 2, 3), run("b", 2, 3)])).toHaveLength(1);
});

it("results of different models do not beat each other", () => {
  const results = [run("small", 2, 3), run("small and worse", 2, 4), run("large", 20, 5)];
  const fronts = paretoFronts(results, ({ id }) => (id.startsWith("small") ? "tiny" : "huge"));
  expect(fronts.map((front) => front.map(({ id }) => id))).toEqual([["small"], ["large"]]);
});
