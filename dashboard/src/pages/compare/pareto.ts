// The Pareto-optimal runs: no other run of the same model is both smaller and better.

export interface Result {
  id: string;
  name: string;
  bytes: number;
  /** How bad it is: its perplexity, or its divergence from the original. */
  loss: number;
  stderr?: number;
}

/** The Pareto front, from the smallest to the best run. Of equal runs the first is kept. */
export function paretoFront<R extends Result>(results: R[]): R[] {
  const sorted = [...results].sort((a, b) => a.bytes - b.bytes || a.loss - b.loss);
  const front: R[] = [];
  for (const result of sorted) {
    const best = front.at(-1);
    if (!best || result.loss < best.loss) front.push(result);
  }
  return front;
}

/** The front of each group: results of different models do not beat each other. */
export function paretoFronts<R extends Result>(results: R[], groupOf: (result: R) => string): R[][] {
  const groups = new Map<string, R[]>();
  for (const result of results) groups.set(groupOf(result), [...(groups.get(groupOf(result)) ?? []), result]);
  return [...groups.values()].map(paretoFront);
}
