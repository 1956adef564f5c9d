// The runs of a comparison and their layers, from the service.
import { get, Problem } from "../../api/client";
import { type Query, queryClient, useQuery } from "../../api/query";
import {
  type EventPage,
  type Job,
  type JobPage,
  type JobSummary,
  type Layer,
  modelOf,
  type ResultChange,
  summaryOf,
} from "../../api/types";
import { plural } from "../../format";
import { FINAL_STATES } from "../../ui/states";
import { type Choice, type Filter, MAX_COMPARED } from "./address";

export interface Runs {
  jobs: Job[];
  /** Runs that the address names and the service does not have. */
  missing: string[];
}

const EVERY_MS = 5000;
const PAGE = 100;

const hasEnded = (job: Job) => FINAL_STATES.has(job.state);
export const hasLayers = (job: Job) => hasEnded(job) && summaryOf(job) !== null;

/** The runs of a comparison. They are read until all have ended. */
export function useRuns(choice: Choice): Query<Runs> {
  const isEmpty = "ids" in choice && choice.ids.length === 0;
  return useQuery(
    isEmpty ? null : `compare ${JSON.stringify(choice)}`,
    (signal, old: Runs | undefined) =>
      "ids" in choice ? readNamed(choice.ids, old, signal) : readMatching(choice.filter, signal),
    { everyMs: (runs) => (runs?.jobs.every(hasEnded) ? 0 : EVERY_MS) },
  );
}

async function readNamed(ids: string[], known: Runs | undefined, signal: AbortSignal): Promise<Runs> {
  checkNumber(ids.length, "The address names");
  const ended = new Map(known?.jobs.filter(hasEnded).map((job) => [job.id, job]));
  const read = async (id: string) =>
    ended.get(id) ??
    get<Job>(`/v1/jobs/${id}`, {}, signal).catch((error: unknown) => {
      if (error instanceof Problem && error.code === "job_not_found") return id;
      throw error;
    });
  const found = await Promise.all(ids.map(read));
  return {
    jobs: found.filter((each) => typeof each !== "string"),
    missing: found.filter((each) => typeof each === "string"),
  };
}

async function readMatching(filter: Filter, signal: AbortSignal): Promise<Runs> {
  const { total } = await get<JobSummary>("/v1/jobs/summary", filter, signal);
  checkNumber(total, "The filter matches");
  const jobs: Job[] = [];
  let cursor: string | null = null;
  do {
    const page: JobPage = await get<JobPage>("/v1/jobs", { ...filter, limit: PAGE, cursor }, signal);
    jobs.push(...page.data);
    cursor = page.next_cursor;
  } while (cursor);
  return { jobs, missing: [] };
}

function checkNumber(count: number, text: string) {
  if (count <= MAX_COMPARED) return;
  throw new Error(
    `${text} ${plural(count, "run")}; at most ${MAX_COMPARED} can be compared. Filter the list of runs by model, label, sweep or text until it has no more, then choose “Compare … results” there.`,
  );
}

/**
 * The change from the result of `base` to that of `job`, by a paired test; null where two runs of a model have none to
 * test. A comparison with it never changes, so it is read once.
 */
export function useChange(job: Job, base: Job): ResultChange | null {
  const isPair = job !== base && modelOf(job) === modelOf(base) && [job, base].every(isMeasured);
  const { data, error } = useQuery<ResultChange>(isPair ? `change ${job.id} from ${base.id}` : null, (signal, old) =>
    old ? Promise.resolve(old) : get<ResultChange>(`/v1/jobs/${job.id}/change`, { base: base.id }, signal),
  );
  return data ?? (error ? { change: null, not_tested: error.message } : null);
}

const isMeasured = (job: Job) => job.state === "succeeded" && summaryOf(job)?.kl_mean != null;

/** The layers of `jobs`; those of each run are read once. */
export function useLayers(jobs: Job[]): Query<{ job: Job; layers: Layer[] }[]> {
  return useQuery(`layers ${jobs.map((job) => job.id).join()}`, () =>
    Promise.all(jobs.map(async (job) => ({ job, layers: await layersOf(job) }))),
  );
}

const layersOf = ({ id }: Job) =>
  queryClient.fetchQuery({
    queryKey: ["layers of", id],
    queryFn: ({ signal }) => readLayers(id, signal),
    staleTime: Number.POSITIVE_INFINITY,
  });

async function readLayers(id: string, signal: AbortSignal): Promise<Layer[]> {
  const layers = new Map<string, Layer>();
  let after = 0;
  for (;;) {
    const page = await get<EventPage>(`/v1/jobs/${id}/events`, { kind: "layer_quantized", limit: 1000, after }, signal);
    for (const event of page.data) {
      const layer = event.data as unknown as Layer;
      layers.set(layer.name, layer);
    }
    after = page.data.at(-1)?.seq ?? after;
    if (!page.has_more) return [...layers.values()];
  }
}
