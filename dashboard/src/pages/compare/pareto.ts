// The Pareto-optimal runs: no other run is both smaller and better.

export interface Result {
  id: string;
  name: string;
  bytes: number;
  /** How bad it is: its perplexity, or its divergence from the original. */
  loss: number;
  stderr?: number;
}

/** The Pareto front, from the smallest to the best run. Of equal runs the first is kept. */
export function paretoFront(results: Result[]): Result[] {
  const sorted = [...results].sort((a, b) => a.bytes - b.bytes || a.loss - b.loss);
  const front: Result[] = [];
  for (const result of sorted) {
    const best = front.at(-1);
    if (!best || result.loss < best.loss) front.push(result);
  }
  return front;
}
