import { getRouteApi } from "@tanstack/react-router";
import { useMemo } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { type Job, type JobPage, modelOf, schemeOf } from "../../api/types";
import { Link } from "../../link";
import { nameOf } from "../../names";
import { CopyButton, Empty, Field, Pending, Title } from "../../ui/basics";
import {
  type Filter,
  linkTo,
  MAX_COMPARED,
  MAX_NAMED,
  MAX_OVERLAID,
  readChoice,
  useChangeView,
  type View,
  viewOf,
} from "./address";
import { ConfigDiff } from "./config-diff";
import { LayersOverlay } from "./overlay";
import { paretoFronts } from "./pareto";
import { ParetoCard } from "./pareto-card";
import { hasLayers, useRuns } from "./read-runs";
import { ResultsTable } from "./results";
import { resultsOf, uniqueNames } from "./runs-of-view";
import { SamplesCard } from "./samples-card";

const route = getRouteApi("/compare");

export default function Compare() {
  const search = route.useSearch();
  const choice = useMemo(() => readChoice(search), [search]);
  const view = useMemo(() => viewOf(search), [search]);
  const query = useRuns(choice);
  const { jobs = [], missing = [] } = query.data ?? {};
  const isNamed = "ids" in choice;
  return (
    <>
      <Title extra={jobs.length > 0 && <CopyButton text={linkTo(search, jobs, location.origin)} label="Copy link" />}>
        Compare
      </Title>
      {isNamed ? <AddRun ids={choice.ids} /> : <Matching filter={choice.filter} />}
      {(!isNamed || choice.ids.length > 0) && <Pending query={query} />}
      {missing.length > 0 && (
        <p className="notice warn">
          {missing.length === 1 ? "One run" : `${missing.length} runs`} of this comparison cannot be shown, because the
          service does not have {missing.length === 1 ? "it" : "them"}: {missing.join(", ")}
        </p>
      )}
      {jobs[0] ? (
        <Comparison
          jobs={jobs}
          base={jobs.find(({ id }) => id === view.baseId) ?? jobs[0]}
          view={view}
          isNamed={isNamed}
        />
      ) : (
        (query.data || isNamed) && !query.error && <NothingChosen />
      )}
    </>
  );
}

function NothingChosen() {
  return (
    <Empty>
      <p>
        Choose runs here, or tick them in the <Link to="/">list of runs</Link>: up to {MAX_NAMED}, the first is the
        baseline.
      </p>
      <p>To compare more, up to {MAX_COMPARED}, filter the list and choose “Compare … results” there.</p>
    </Empty>
  );
}

function Comparison({ jobs, base, view, isNamed }: { jobs: Job[]; base: Job; view: View; isNamed: boolean }) {
  const names = useMemo(() => uniqueNames(jobs), [jobs]);
  const results = useMemo(() => resultsOf(jobs, names), [jobs, names]);
  const fronts = useMemo(() => paretoFronts(results, ({ model }) => model), [results]);
  const optimal = useMemo(() => new Set(fronts.flat().map(({ id }) => id)), [fronts]);
  const chosen = view.overlaid?.join() ?? null;
  const overlaid = useMemo(() => chooseOverlaid(jobs, base, chosen), [jobs, base, chosen]);
  const ofModel = overlaid.filter((job) => job.state === "succeeded" && modelOf(job) === modelOf(base));
  const overlaidIds = useMemo(() => new Set(overlaid.map(({ id }) => id)), [overlaid]);
  return (
    <>
      <ResultsTable
        jobs={jobs}
        base={base}
        names={names}
        optimal={optimal}
        overlaid={overlaidIds}
        order={view.order}
        isNamed={isNamed}
      />
      <ParetoCard results={results} fronts={fronts} />
      {jobs.some(hasLayers) && <LayersOverlay jobs={overlaid} numRuns={jobs.length} names={names} view={view} />}
      {ofModel.length > 0 && <SamplesCard jobs={ofModel} names={names} />}
      {jobs.length > 1 && <ConfigDiff jobs={jobs} base={base} names={names} />}
    </>
  );
}

/** The runs whose layers are shown: those that were chosen, or else the first ones. */
function chooseOverlaid(jobs: Job[], base: Job, chosen: string | null): Job[] {
  const able = [base, ...jobs.filter((job) => job !== base)].filter(hasLayers);
  return (chosen !== null ? able.filter(({ id }) => chosen.includes(id)) : able).slice(0, MAX_OVERLAID);
}

/** The filter that chose the runs. */
function Matching({ filter: { created_before, ...inList } }: { filter: Filter }) {
  const values = Object.entries({ ...inList, created_before }).flatMap(([name, value]) =>
    [value ?? []].flat().map((each) => [name, each] as const),
  );
  return (
    <p className="row">
      Runs that match
      {values.map(([name, value]) => (
        <span key={name + value} className="chip wrap">
          {name.replace("_", " ")} {value}
        </span>
      ))}
      <Link to="/" search={inList}>
        Change the filter
      </Link>
    </p>
  );
}

function AddRun({ ids }: { ids: string[] }) {
  const changeView = useChangeView();
  const others = useQuery("runs to compare", (signal) =>
    get<JobPage>("/v1/jobs", { state: ["succeeded"], limit: 100 }, signal),
  );
  if (ids.length >= MAX_NAMED) return null;
  if (!others.data) return <Pending query={others} />;
  const free = others.data.data.filter((job) => !ids.includes(job.id));
  const add = (id: string) => changeView({ job: [...ids, id] });
  return (
    <Field label="Add a finished run">
      {(props) => (
        <select {...props} value="" onChange={(event) => event.target.value && add(event.target.value)}>
          <option value="">{free.length ? "Choose a run…" : "No other finished runs"}</option>
          {free.map((job) => (
            <option key={job.id} value={job.id}>
              {nameOf(job)} · {schemeOf(job)} · {job.id.slice(-6)}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}
