// The filters of the list of runs. All of them are in the address.
import { type FormEvent, useEffect, useState } from "react";
import type { JobSummary, State } from "../../api/types";
import { Link, navigate, withParams } from "../../router";
import { STATE_ORDER, STATES } from "../../ui/states";

export const FILTERS = ["state", "q", "label", "sweep", "model"];

/** The filters in the address, as API parameters. */
export function readFilters(search: URLSearchParams) {
  return Object.fromEntries(FILTERS.map((name) => [name, search.getAll(name)]));
}

export function StateChips({ search, summary }: { search: URLSearchParams; summary: JobSummary | undefined }) {
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

export function Search({ search }: { search: URLSearchParams }) {
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

export function ActiveFilters({ search }: { search: URLSearchParams }) {
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
