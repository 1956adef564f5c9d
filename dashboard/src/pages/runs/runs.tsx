import { getRouteApi } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { type Job, type JobPage, type JobSummary, modelOf, type SweepBrief, type SweepPage } from "../../api/types";
import { plural, shortId, shortName } from "../../format";
import { Link } from "../../link";
import { nameOf } from "../../names";
import { FILTERS, listFiltersOf, type RunsSearch } from "../../search";
import { useSession } from "../../sign-in";
import { useStateChanges } from "../../state-changes";
import { announce } from "../../ui/announcer";
import { Empty, Failure, Loading, scrollable, Title } from "../../ui/basics";
import { STATES } from "../../ui/states";
import { compareAllLink, MAX_COMPARED } from "../compare/address";
import { FirstJob } from "../first-job";
import { RunLink } from "../job-progress";
import { columnsOf, orderOf, ViewFields } from "./columns";
import { ActiveFilters, Search, StateChips } from "./filters";
import { GroupField, GroupTable } from "./groups";
import { LocalRuns } from "./local-runs";
import { Selection } from "./selection";
import { ShortcutHelp, useShortcuts } from "./shortcuts";
import { SweepRow } from "./sweep-row";

const PAGE = 50;
const MOST_SWEEPS = 100;
const EVERY_MS = 3000;
const route = getRouteApi("/");

export function Runs() {
  const search = route.useSearch();
  const session = useSession();
  const { cursor, group } = search;
  const { state, ...others } = listFiltersOf(search);
  const order = orderOf(search);
  const isFiltered = FILTERS.some((name) => search[name]?.length);
  const areSweepsOpen = isFiltered || order !== undefined; // a sweep has no place in an order of runs
  const params = { ...others, state, limit: PAGE, cursor, order, ...(areSweepsOpen ? {} : { one_per_sweep: true }) };
  const jobs = useQuery(
    group === undefined ? `jobs ${JSON.stringify(params)}` : null,
    (signal) => get<JobPage>("/v1/jobs", params, signal),
    { everyMs: EVERY_MS },
  );
  const summary = useQuery(
    `summary ${JSON.stringify(others)}`,
    (signal) => get<JobSummary>("/v1/jobs/summary", others, signal),
    { everyMs: EVERY_MS },
  );
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const shown = jobs.data?.data ?? [];
  useStateChanges(shown, announceStates);

  const select = (ids: string[], isOn: boolean) =>
    setSelected((old) => new Set(isOn ? [...old, ...ids] : [...old].filter((id) => !ids.includes(id))));
  const toggle = (id: string) => select([id], !selected.has(id));
  const alone = shown.filter((job) => areSweepsOpen || !job.sweep_id);
  const sweeps = useSweeps(alone.length < shown.length);
  const { cursorId, helpShown, closeHelp } = useShortcuts(alone, toggle, [...selected], session.can("jobs:write"));

  return (
    <>
      <Title extra={<Search search={search} />}>Runs</Title>
      <div className="row spread">
        <StateChips search={search} summary={summary.data} />
        <div className="row">
          <GroupField search={search} />
          {shown.length > 0 && <ViewFields search={search} />}
          <CompareResults search={search} count={summary.data?.by_state.succeeded ?? 0} isFiltered={isFiltered} />
        </div>
      </div>
      <ActiveFilters search={search} />
      {jobs.error && !jobs.data && <Failure error={jobs.error} retry={jobs.reload} />}
      {group !== undefined && <GroupTable search={search} by={group} />}
      {group === undefined && !jobs.data && !jobs.error && <Loading />}
      {jobs.data && shown.length === 0 && <NoRuns isFiltered={isFiltered} />}
      {shown.length > 0 && (
        <>
          <RunTable
            search={search}
            jobs={shown}
            alone={alone}
            sweeps={sweeps}
            selected={selected}
            select={select}
            cursorId={cursorId}
          />
          <Pages search={search} page={jobs.data} />
        </>
      )}
      {!isFiltered && !cursor && group === undefined && <LocalRuns />}
      {selected.size > 0 && (
        <Selection
          ids={[...selected]}
          jobs={shown}
          clear={() => setSelected(new Set())}
          onCancelled={() => {
            jobs.reload();
            summary.reload();
          }}
        />
      )}
      {helpShown && <ShortcutHelp onClose={closeHelp} />}
    </>
  );
}

/** The newest sweeps by id: those of the rows that stand for one. */
function useSweeps(isNeeded: boolean): ReadonlyMap<string, SweepBrief> {
  const query = useQuery(
    isNeeded ? "sweeps" : null,
    (signal) => get<SweepPage>("/v1/sweeps", { limit: MOST_SWEEPS }, signal),
    { everyMs: EVERY_MS },
  );
  return useMemo(() => new Map(query.data?.data.map((sweep) => [sweep.id, sweep])), [query.data]);
}

function RunTable({
  search,
  jobs,
  alone,
  sweeps,
  selected,
  select,
  cursorId,
}: {
  search: RunsSearch;
  jobs: Job[];
  /** Those that are rows of their own; any other stands for its sweep. */
  alone: Job[];
  sweeps: ReadonlyMap<string, SweepBrief>;
  selected: ReadonlySet<string>;
  select: (ids: string[], isOn: boolean) => void;
  cursorId: string | null;
}) {
  const columns = columnsOf(search);
  const order = orderOf(search);
  const areAllSelected = alone.length > 0 && alone.every((job) => selected.has(job.id));
  return (
    <div className="table runs" ref={scrollable}>
      <table>
        <thead>
          <tr>
            <th className="check">
              <input
                type="checkbox"
                aria-label="Select all runs on this page"
                checked={areAllSelected}
                onChange={() =>
                  select(
                    alone.map((job) => job.id),
                    !areAllSelected,
                  )
                }
              />
            </th>
            <th>Run</th>
            {columns.map((column) => (
              <th
                key={column.id}
                className={column.className === "number" ? "number" : undefined}
                aria-sort={order && order === column.order ? "ascending" : undefined}
              >
                {column.head}
                {order && order === column.order && <span aria-hidden="true"> ↑</span>}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) =>
            !alone.includes(job) ? (
              <SweepRow key={job.id} job={job} sweep={sweeps.get(job.sweep_id ?? "")} columns={columns} />
            ) : (
              <tr key={job.id} id={`row-${job.id}`} className={job.id === cursorId ? "cursor" : undefined}>
                <td className="check">
                  <input
                    type="checkbox"
                    aria-label={`Select ${nameOf(job)}`}
                    checked={selected.has(job.id)}
                    onChange={() => select([job.id], !selected.has(job.id))}
                  />
                </td>
                <td className="name">
                  <RunLink job={job} />
                  <div className="sub" title={modelOf(job)}>
                    {job.name ? shortName(modelOf(job)) : shortId(job.id)}
                  </div>
                </td>
                {columns.map(({ id, head, className, cell }) => (
                  <td key={id} className={className} data-label={id === "progress" ? undefined : head}>
                    {cell(job)}
                  </td>
                ))}
              </tr>
            ),
          )}
        </tbody>
      </table>
    </div>
  );
}

/** The way to a comparison of all results that the filters match, however many pages they fill. */
function CompareResults({ search, count, isFiltered }: { search: RunsSearch; count: number; isFiltered: boolean }) {
  if (count < 2) return null;
  if (count <= MAX_COMPARED) return <Link {...compareAllLink(search)}>Compare {plural(count, "result")}</Link>;
  return isFiltered && <span className="faint">Filter to at most {MAX_COMPARED} results to compare them all.</span>;
}

function NoRuns({ isFiltered }: { isFiltered: boolean }) {
  if (isFiltered) {
    return (
      <Empty>
        <p>No runs match these filters.</p>
        <Link to="/">Clear filters</Link>
      </Empty>
    );
  }
  return <FirstJob>No runs yet. Each job appears here with its progress, and then with its size and quality.</FirstJob>;
}

function Pages({ search, page }: { search: RunsSearch; page: JobPage | undefined }) {
  if (!page || (!page.next_cursor && !search.cursor)) return null;
  return (
    <nav className="row spread" aria-label="Pagination">
      {search.cursor ? (
        <Link to="/" search={{ ...search, cursor: undefined }}>
          {orderOf(search) ? "← First" : "← Newest"}
        </Link>
      ) : (
        <span />
      )}
      {page.next_cursor && (
        <Link to="/" search={{ ...search, cursor: page.next_cursor }} onClick={() => window.scrollTo(0, 0)}>
          {orderOf(search) ? "More →" : "Older →"}
        </Link>
      )}
    </nav>
  );
}

/** Announces to screen readers which runs on the page have changed their state. */
function announceStates(changed: Job[]) {
  if (changed.length > 3) announce(`${changed.length} runs have changed state.`);
  else announce(changed.map((job) => `${nameOf(job)}: ${STATES[job.state].text}`).join(". "));
}
