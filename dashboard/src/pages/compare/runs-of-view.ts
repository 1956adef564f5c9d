// What the runs of a comparison are called, their places in the table, and their size and quality.
import { type Job, modelOf, schemeOf, summaryOf } from "../../api/types";
import { nameOf } from "../../names";
import { ROWS } from "./change";
import type { Result } from "./pareto";

/** Names of runs for charts and tables. Runs with the same name get the end of their id. */
export function uniqueNames(jobs: Job[]): Map<string, string> {
  const counts = new Map<string, number>();
  for (const job of jobs) counts.set(nameOf(job), (counts.get(nameOf(job)) ?? 0) + 1);
  return new Map(
    jobs.map((job) => [
      job.id,
      (counts.get(nameOf(job)) ?? 0) > 1 ? `${nameOf(job)} …${job.id.slice(-8)}` : nameOf(job),
    ]),
  );
}

/** The runs in the order of a metric, "size_bytes" or from the largest "-size_bytes"; the baseline is always first. */
export function sorted(jobs: Job[], base: Job, order: string | null): Job[] {
  const others = jobs.filter((job) => job !== base);
  const row = ROWS.find(({ id }) => id === order?.replace(/^-/, ""));
  if (!row) return [base, ...others];
  const sign = order?.startsWith("-") ? -1 : 1;
  const placeOf = (job: Job) => {
    const summary = summaryOf(job);
    const value = summary && row.value(summary);
    return value == null ? Number.POSITIVE_INFINITY : sign * value; // what was not measured comes last
  };
  const values = new Map(others.map((job) => [job, placeOf(job)]));
  return [base, ...others.sort((a, b) => compare(values.get(a), values.get(b)))];
}

const compare = (a = 0, b = 0) => (a < b ? -1 : a > b ? 1 : 0);

export interface RunResult extends Result {
  model: string;
  preset: string;
}

/** The runs of which size and quality are known. The perplexity is that against the original on the same tokens. */
export function resultsOf(jobs: Job[], names: ReadonlyMap<string, string>): RunResult[] {
  return jobs.flatMap((job) => {
    const summary = summaryOf(job);
    if (summary?.perplexity_ratio == null) return [];
    const { size_after_bytes: bytes, perplexity_ratio: ratio, perplexity_ratio_stderr: stderr } = summary;
    const name = names.get(job.id) ?? job.id;
    const loss = ratio - 1;
    return [{ id: job.id, name, bytes, loss, stderr: stderr ?? undefined, model: modelOf(job), preset: schemeOf(job) }];
  });
}
