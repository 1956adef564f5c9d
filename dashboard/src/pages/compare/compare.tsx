import { useMemo } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import {
  type EventPage,
  type Job,
  type JobPage,
  type Layer,
  type Measured,
  type Report,
  schemeOf,
  summaryOf,
} from "../../api/types";
import { nameOf } from "../../names";
import { Link, navigate, type Place } from "../../router";
import { Empty, Failure, Field, Loading, Time, Title } from "../../ui/basics";
import { FINAL_STATES, StateLabel } from "../../ui/states";
import { compareAddress, MAX_COMPARED } from "./address";
import { ConfigDiff } from "./config-diff";
import { LayersOverlay } from "./overlay";
import { ParetoCard } from "./pareto-card";
import { ResultsTable } from "./results";

const NO_RATIOS: ReadonlyMap<string, Measured> = new Map();

export default function Compare({ place: { search } }: { place: Place }) {
  const ids = [...new Set(search.getAll("job"))].slice(0, MAX_COMPARED);
  const query = useQuery(
    ids.length ? `compare ${ids.join()}` : null,
    (signal) => Promise.all(ids.map((id) => get<Job>(`/v1/jobs/${id}`, {}, signal))),
    { everyMs: 5000 },
  );
  const jobs = query.data ?? [];
  return (
    <>
      <Title>Compare</Title>
      {query.error && !query.data && <Failure error={query.error} retry={query.reload} />}
      {ids.length > 0 && !query.data && !query.error && <Loading />}
      <Chosen jobs={jobs} ids={ids} />
      {ids.length < 2 ? (
        <Empty>Choose two to eight runs here, or by ticking runs in the list. The first run is the baseline.</Empty>
      ) : (
        query.data && <Comparison jobs={jobs} />
      )}
    </>
  );
}

function Comparison({ jobs }: { jobs: Job[] }) {
  const withLayers = jobs.filter((job) => FINAL_STATES.has(job.state) && summaryOf(job));
  const layers = useQuery(`layers ${withLayers.map((job) => job.id).join()}`, (signal) =>
    Promise.all(withLayers.map(async (job) => ({ job, layers: await readLayers(job.id, signal) }))),
  );
  const done = jobs.filter((job) => job.artifact);
  const reports = useQuery(`ratios ${done.map((job) => job.id).join()}`, (signal) => readRatios(done, signal));
  const ratios = reports.data ?? NO_RATIOS;
  const names = useMemo(() => uniqueNames(jobs), [jobs]);
  return (
    <>
      <ResultsTable jobs={jobs} names={names} ratios={ratios} />
      <ParetoCard jobs={jobs} names={names} ratios={ratios} />
      {layers.data && layers.data.length > 0 && <LayersOverlay runs={layers.data} names={names} />}
      <ConfigDiff jobs={jobs} names={names} />
    </>
  );
}

/** Names of runs for charts and tables. Runs with the same name get the end of their id. */
function uniqueNames(jobs: Job[]): Map<string, string> {
  const count = (label: string) => jobs.filter((job) => nameOf(job) === label).length;
  return new Map(
    jobs.map((job) => [job.id, count(nameOf(job)) > 1 ? `${nameOf(job)} …${job.id.slice(-4)}` : nameOf(job)]),
  );
}

/** The perplexity of each result against its original's, with its standard error, from the reports. */
async function readRatios(jobs: Job[], signal: AbortSignal): Promise<Map<string, Measured>> {
  const reports = await Promise.all(
    jobs.map(({ id }) => get<Report>(`/v1/jobs/${id}/artifacts/report.json`, {}, signal)),
  );
  return new Map(reports.flatMap(({ quality }, index) => (quality ? [[jobs[index]?.id ?? "", quality.ratio]] : [])));
}

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

function Chosen({ jobs, ids }: { jobs: Job[]; ids: string[] }) {
  const others = useQuery("runs to compare", (signal) =>
    get<JobPage>("/v1/jobs", { state: ["succeeded"], limit: 100 }, signal),
  );
  const free = others.data?.data.filter((job) => !ids.includes(job.id)) ?? [];
  return (
    <section className="card">
      <div className="chips">
        {jobs.map((job, index) => (
          <span key={job.id} className="chip compared">
            <Link to={`/jobs/${job.id}`}>{nameOf(job)}</Link>
            {index === 0 && <strong>baseline</strong>}
            <StateLabel state={job.state} /> <Time at={job.created_at} />
            {index > 0 && (
              <button
                type="button"
                className="small"
                onClick={() =>
                  navigate(compareAddress([job.id, ...ids.filter((id) => id !== job.id)]), { replace: true })
                }
              >
                Set as baseline
              </button>
            )}
            <button
              type="button"
              className="small"
              aria-label={`Remove ${nameOf(job)}`}
              onClick={() => navigate(compareAddress(ids.filter((id) => id !== job.id)), { replace: true })}
            >
              ✕
            </button>
          </span>
        ))}
      </div>
      {ids.length < MAX_COMPARED && (
        <Field label="Add a finished run">
          {(props) => (
            <select
              {...props}
              value=""
              onChange={(event) =>
                event.target.value && navigate(compareAddress([...ids, event.target.value]), { replace: true })
              }
            >
              <option value="">{free.length ? "Choose a run…" : "No other finished runs"}</option>
              {free.map((job) => (
                <option key={job.id} value={job.id}>
                  {nameOf(job)} · {schemeOf(job)} · {job.id.slice(-6)}
                </option>
              ))}
            </select>
          )}
        </Field>
      )}
    </section>
  );
}
