import { type FormEvent, useEffect, useRef, useState } from "react";
import { get, post } from "../api/client";
import { useQuery } from "../api/query";
import { type Job, type JobPage, type JobSummary, modelOf, type State, schemeOf } from "../api/types";
import { plural, shortId, shortName } from "../format";
import { OPERATOR } from "../labels";
import { Link, navigate, type Place, withParams } from "../router";
import { useSession } from "../sign-in";
import { announce } from "../ui/announcer";
import { Confirm, Empty, Failure, Loading, scrollable, Time, Title } from "../ui/basics";
import { ACTIONS, STATE_ORDER, STATES, StateLabel } from "../ui/states";
import { JobProgress, PerplexityChange, SizeChange } from "./job-progress";
import { compareAddress, ShortcutHelp, useShortcuts } from "./shortcuts";

const PAGE = 50;
const EVERY_MS = 3000;
const FILTERS = ["state", "q", "label", "sweep", "model"];

/** The filters in the address, as API parameters. */
function readFilters(search: URLSearchParams) {
  return Object.fromEntries(FILTERS.map((name) => [name, search.getAll(name)]));
}

export function Runs({ place: { search } }: { place: Place }) {
  const session = useSession();
  const filters = readFilters(search);
  const cursor = search.get("cursor");
  const params = { ...filters, limit: PAGE, cursor };
  const jobs = useQuery(`jobs ${JSON.stringify(params)}`, (signal) => get<JobPage>("/v1/jobs", params, signal), {
    everyMs: EVERY_MS,
  });
  const { state: _, ...others } = filters;
  const summary = useQuery(
    `summary ${JSON.stringify(others)}`,
    (signal) => get<JobSummary>("/v1/jobs/summary", others, signal),
    { everyMs: EVERY_MS },
  );
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const [cancelling, setCancelling] = useState(false);
  const shown = jobs.data?.data ?? [];
  useAnnounceStateChanges(shown);

  const toggle = (id: string) =>
    setSelected((old) => {
      const next = new Set(old);
      if (!next.delete(id)) next.add(id);
      return next;
    });
  const { cursorId, helpShown, closeHelp } = useShortcuts(shown, toggle, [...selected], session.can("jobs:write"));
  const isFiltered = FILTERS.some((name) => search.has(name));

  return (
    <>
      <Title
        extra={
          <div className="row">
            <Search search={search} />
            {session.can("jobs:write") && (
              <Link to="/jobs/new" className="button primary">
                New job
              </Link>
            )}
          </div>
        }
      >
        Runs
      </Title>
      <StateChips search={search} summary={summary.data} />
      <ActiveFilters search={search} />
      {jobs.error && !jobs.data && <Failure error={jobs.error} retry={jobs.reload} />}
      {!jobs.data && !jobs.error && <Loading />}
      {jobs.data && shown.length === 0 && <NoRuns isFiltered={isFiltered} mayWrite={session.can("jobs:write")} />}
      {shown.length > 0 && (
        <>
          <RunTable jobs={shown} selected={selected} toggle={toggle} cursorId={cursorId} />
          <Pages search={search} page={jobs.data} />
        </>
      )}
      {selected.size > 0 && (
        <section className="selection" aria-label="Selected runs">
          <strong>{plural(selected.size, "run")} selected</strong>
          <button
            type="button"
            disabled={selected.size < 2 || selected.size > 8}
            onClick={() => navigate(compareAddress([...selected]))}
          >
            Compare
          </button>
          {session.can("jobs:write") && (
            <button type="button" className="danger" onClick={() => setCancelling(true)}>
              Cancel
            </button>
          )}
          <button type="button" onClick={() => setSelected(new Set())}>
            Clear
          </button>
          {selected.size > 8 && <span className="faint">You can compare up to 8 runs.</span>}
        </section>
      )}
      {cancelling && (
        <CancelMany
          ids={[...selected]}
          jobs={shown}
          onClose={() => setCancelling(false)}
          onDone={() => {
            setSelected(new Set());
            jobs.reload();
            summary.reload();
          }}
        />
      )}
      {helpShown && <ShortcutHelp onClose={closeHelp} />}
    </>
  );
}

function RunTable({
  jobs,
  selected,
  toggle,
  cursorId,
}: {
  jobs: Job[];
  selected: ReadonlySet<string>;
  toggle: (id: string) => void;
  cursorId: string | null;
}) {
  return (
    <div className="table runs" ref={scrollable}>
      <table>
        <thead>
          <tr>
            <th className="check">
              <span className="hidden">Select</span>
            </th>
            <th>Run</th>
            <th>Preset</th>
            <th>State</th>
            <th>Progress</th>
            <th className="number">Size</th>
            <th className="number">Perplexity</th>
            <th>Owner</th>
            <th>Created</th>
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <tr key={job.id} id={`row-${job.id}`} className={job.id === cursorId ? "cursor" : undefined}>
              <td className="check">
                <input
                  type="checkbox"
                  aria-label={`Select ${job.name ?? job.id}`}
                  checked={selected.has(job.id)}
                  onChange={() => toggle(job.id)}
                />
              </td>
              <td className="name">
                <div>
                  <Link to={`/jobs/${job.id}`} title={job.id}>
                    {job.name ?? shortName(modelOf(job))}
                  </Link>
                </div>
                <div className="sub" title={modelOf(job)}>
                  {job.name ? shortName(modelOf(job)) : shortId(job.id)}
                </div>
              </td>
              <td data-label="Preset">{schemeOf(job)}</td>
              <td data-label="State">
                <StateLabel state={job.state} />
              </td>
              <td>
                <JobProgress job={job} />
              </td>
              <td className="number" data-label="Size">
                <SizeChange job={job} />
              </td>
              <td className="number" data-label="Perplexity">
                <PerplexityChange job={job} />
              </td>
              <td data-label="Owner">{job.submitted_by?.name ?? OPERATOR}</td>
              <td className="nowrap" data-label="Created">
                <Time at={job.created_at} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function StateChips({ search, summary }: { search: URLSearchParams; summary: JobSummary | undefined }) {
  const wanted = search.getAll("state");
  const to = (states: string[]) => `/${withParams(search, { state: states, cursor: null })}`;
  const shown = STATE_ORDER.filter((state) => summary?.by_state[state] || wanted.includes(state));
  return (
    <nav className="chips" aria-label="Runs by state">
      <Link to={to([])} className="chip" aria-current={wanted.length ? undefined : "true"}>
        All <span className="count">{summary?.total ?? "…"}</span>
      </Link>
      {shown.map((state: State) => {
        const on = wanted.includes(state);
        return (
          <Link
            key={state}
            className="chip"
            aria-current={on ? "true" : undefined}
            to={to(on ? wanted.filter((each) => each !== state) : [...wanted, state])}
          >
            <span aria-hidden="true">{STATES[state].icon}</span> {STATES[state].text}{" "}
            <span className="count">{summary?.by_state[state] ?? 0}</span>
          </Link>
        );
      })}
    </nav>
  );
}

function Search({ search }: { search: URLSearchParams }) {
  const [text, setText] = useState(search.get("q") ?? "");
  const inAddress = search.get("q") ?? "";
  useEffect(() => setText(inAddress), [inAddress]);
  useEffect(() => {
    if (text === inAddress) return;
    const timer = window.setTimeout(() => {
      const now = new URLSearchParams(window.location.search);
      navigate(`/${withParams(now, { q: text || null, cursor: null })}`, { replace: true });
    }, 300);
    return () => window.clearTimeout(timer);
  }, [text, inAddress]);
  const byLabel = (event: FormEvent) => {
    event.preventDefault();
    if (!/^[^=\s]+=/.test(text)) return;
    setText("");
    const labels = [...search.getAll("label"), text];
    navigate(`/${withParams(search, { q: null, label: labels, cursor: null })}`);
  };
  return (
    <search>
      <form onSubmit={byLabel}>
        <input
          id="search"
          type="search"
          value={text}
          onChange={(event) => setText(event.target.value)}
          placeholder="Name, model or label=value"
          aria-label="Search runs"
          size={30}
        />
      </form>
    </search>
  );
}

function ActiveFilters({ search }: { search: URLSearchParams }) {
  const active = ["label", "sweep", "model"].flatMap((name) =>
    search.getAll(name).map((value) => [name, value] as const),
  );
  if (!active.length) return null;
  return (
    <div className="chips">
      {active.map(([name, value]) => (
        <button
          type="button"
          key={name + value}
          className="chip"
          aria-label={`Remove filter: ${name} ${value}`}
          onClick={() => {
            const rest = search.getAll(name).filter((each) => each !== value);
            navigate(`/${withParams(search, { [name]: rest, cursor: null })}`);
          }}
        >
          {name} {value} ✕
        </button>
      ))}
    </div>
  );
}

function NoRuns({ isFiltered, mayWrite }: { isFiltered: boolean; mayWrite: boolean }) {
  if (isFiltered) {
    return (
      <Empty>
        <p>No runs match these filters.</p>
        <Link to="/">Clear filters</Link>
      </Empty>
    );
  }
  return (
    <Empty>
      <p>No runs yet.</p>
      {mayWrite && (
        <Link to="/jobs/new" className="button primary">
          Create your first job
        </Link>
      )}
    </Empty>
  );
}

function Pages({ search, page }: { search: URLSearchParams; page: JobPage | undefined }) {
  if (!page || (!page.next_cursor && !search.has("cursor"))) return null;
  return (
    <nav className="row spread" aria-label="Pagination">
      {search.has("cursor") ? <Link to={`/${withParams(search, { cursor: null })}`}>← Newest</Link> : <span />}
      {page.next_cursor && (
        <Link to={`/${withParams(search, { cursor: page.next_cursor })}`} onClick={() => window.scrollTo(0, 0)}>
          Older →
        </Link>
      )}
    </nav>
  );
}

function CancelMany({
  ids,
  jobs,
  onClose,
  onDone,
}: {
  ids: string[];
  jobs: Job[];
  onClose: () => void;
  onDone: () => void;
}) {
  const states = new Map(jobs.map((job) => [job.id, job.state]));
  const possible = ids.filter((id) => {
    const state = states.get(id);
    return !state || ACTIONS[state].includes("cancel");
  });
  const cancel = async () => {
    const answers = await Promise.allSettled(possible.map((id) => post(`/v1/jobs/${id}/cancel`)));
    const failed = answers.filter((each) => each.status === "rejected");
    onDone();
    announce(`${plural(answers.length - failed.length, "run")} cancelled.`);
    if (failed[0])
      throw new Error(`${failed.length} of ${answers.length} runs could not be cancelled: ${failed[0].reason.message}`);
  };
  return (
    <Confirm
      title="Cancel these runs?"
      action={`Cancel ${plural(possible.length, "run")}`}
      onConfirm={cancel}
      onClose={onClose}
    >
      <p>Their progress is lost. {ids.length - possible.length > 0 && "Runs that have ended are not affected."}</p>
    </Confirm>
  );
}

/** Announces to screen readers which runs on the page have changed their state. */
function useAnnounceStateChanges(jobs: Job[]) {
  const before = useRef(new Map<string, State>());
  useEffect(() => {
    const changed = jobs.filter((job) => {
      const old = before.current.get(job.id);
      return old && old !== job.state;
    });
    if (changed.length > 3) announce(`${changed.length} runs have changed state.`);
    else if (changed.length) {
      announce(changed.map((job) => `${job.name ?? job.id}: ${STATES[job.state].text}`).join(". "));
    }
    before.current = new Map(jobs.map((job) => [job.id, job.state]));
  }, [jobs]);
}
