// The Pareto-optimal runs: no other run is both smaller and better.

export interface Result {
  id: string;
  name: string;
  bytes: number;
  perplexity: number;
  stderr?: number;
}

/** The Pareto front, from the smallest to the best run. Of equal runs the first is kept. */
export function paretoFront(results: Result[]): Result[] {
  const sorted = [...results].sort((a, b) => a.bytes - b.bytes || a.perplexity - b.perplexity);
  const front: Result[] = [];
  for (const result of sorted) {
    const best = front.at(-1);
    if (!best || result.perplexity < best.perplexity) front.push(result);
  }
  return front;
}
