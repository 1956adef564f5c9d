// The Pareto-optimal runs: no other run is both smaller and better.

export interface Result {
  id: string;
  name: string;
  bytes: number;
  perplexity: number;
  stderr?: number;
}

/** The front from the smallest to the best. Of equals the first one stays. */
export function paretoFront(results: Result[]): Result[] {
  const sorted = [...results].sort((a, b) => a.bytes - b.bytes || a.perplexity - b.perplexity);
  const front: Result[] = [];
  for (const result of sorted) {
    const best = front.at(-1);
    if (!best || result.perplexity < best.perplexity) front.push(result);
  }
  return front;
}
