// The filters of the list of runs. All of them are in the address.
import { useNavigate } from "@tanstack/react-router";
import { type FormEvent, useEffect, useState } from "react";
import type { JobSummary, State } from "../../api/types";
import { Link } from "../../link";
import type { RunsSearch } from "../../search";
import { STATE_ORDER, STATES } from "../../ui/states";

export function StateChips({ search, summary }: { search: RunsSearch; summary: JobSummary | undefined }) {
  const wanted = search.state ?? [];
  const withStates = (state: string[]) => ({ ...search, state, cursor: undefined });
  const shown = STATE_ORDER.filter((state) => summary?.by_state[state] || wanted.includes(state));
  return (
    <nav className="chips" aria-label="Runs by state">
      <Link to="/" search={withStates([])} className="chip" current={!wanted.length}>
        All <span className="count">{summary?.total ?? "…"}</span>
      </Link>
      {shown.map((state: State) => {
        const on = wanted.includes(state);
        return (
          <Link
            key={state}
            className="chip"
            current={on}
            to="/"
            search={withStates(on ? wanted.filter((each) => each !== state) : [...wanted, state])}
          >
            <span aria-hidden="true">{STATES[state].icon}</span> {STATES[state].text}{" "}
            <span className="count">{summary?.by_state[state] ?? 0}</span>
          </Link>
        );
      })}
    </nav>
  );
}

export function Search({ search }: { search: RunsSearch }) {
  const navigate = useNavigate({ from: "/" });
  const inAddress = search.q ?? "";
  const [text, setText] = useState(inAddress);
  useEffect(() => setText(inAddress), [inAddress]);
  useEffect(() => {
    if (text === inAddress) return;
    const timer = window.setTimeout(
      () => void navigate({ search: (now) => ({ ...now, q: text || undefined, cursor: undefined }), replace: true }),
      300,
    );
    return () => window.clearTimeout(timer);
  }, [text, inAddress, navigate]);
  const byLabel = (event: FormEvent) => {
    event.preventDefault();
    if (!/^[^=\s]+=/.test(text)) return;
    setText("");
    const label = [...(search.label ?? []), text];
    void navigate({ search: { ...search, q: undefined, label, cursor: undefined } });
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

export function ActiveFilters({ search }: { search: RunsSearch }) {
  const navigate = useNavigate({ from: "/" });
  const active = (["label", "sweep", "model"] as const).flatMap((name) =>
    (search[name] ?? []).map((value) => [name, value] as const),
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
            const rest = search[name]?.filter((each) => each !== value);
            void navigate({ search: { ...search, [name]: rest, cursor: undefined } });
          }}
        >
          {name} {value} ✕
        </button>
      ))}
    </div>
  );
}
