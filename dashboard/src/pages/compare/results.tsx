import { defaultRangeExtractor, type Range, useVirtualizer } from "@tanstack/react-virtual";
import { memo, useCallback, useMemo, useRef, useState } from "react";
import { type Job, modelOf, type PairedChange, type ResultChange, schemeOf, summaryOf } from "../../api/types";
import { saveFile } from "../../download";
import { shortName } from "../../format";
import { Link } from "../../link";
import { TERMS } from "../../terms";
import { ActionsHead, Code, scrollable, Term } from "../../ui/basics";
import { StateLabel } from "../../ui/states";
import { VerdictLevel } from "../job-progress";
import { quoted } from "../new-job/snippets";
import { endsOf } from "../run/verdict";
import { MAX_OVERLAID, overlaying, useChangeView } from "./address";
import { changeOf, halfInterval, ROWS, type Row, verdictOf } from "./change";
import { csvOf } from "./csv";
import { hasLayers, useChange } from "./read-runs";
import { sorted } from "./runs-of-view";

const ROW_PX = 58; // until a row has been measured
const OVERSCAN = 5;

interface Props {
  jobs: Job[];
  base: Job;
  names: ReadonlyMap<string, string>;
  /** The ids of the Pareto-optimal runs, and of those whose layers are shown. */
  optimal: ReadonlySet<string>;
  overlaid: ReadonlySet<string>;
  order: string | null;
  /** Whether the runs are named one by one, so that one can be taken out. */
  isNamed: boolean;
}

/**
 * Each run with its metrics and their changes from the baseline, marked by sign and word, not by colour alone. There
 * may be hundreds of runs: the page has the rows that are on the screen, some beside them, and the one with the focus.
 */
export function ResultsTable({ jobs, base, names, optimal, overlaid, order, isNamed }: Props) {
  const shown = useMemo(() => sorted(jobs, base, order), [jobs, base, order]);
  const metrics = useMemo(
    () => ROWS.filter((row) => !row.onlyInFile && jobs.some((job) => valueIn(row, job) != null)),
    [jobs],
  );
  const isMixed = jobs.some((job) => modelOf(job) !== modelOf(base));
  const [box, setBox] = useState<HTMLElement | null>(null);
  const scrolledBox = useCallback((element: HTMLElement | null) => {
    setBox(element);
    return scrollable(element);
  }, []);
  const [focusedId, setFocusedId] = useState<string>();
  const keepFocused = (range: Range) => {
    const focused = shown.findIndex(({ id }) => id === focusedId);
    return [...new Set([...defaultRangeExtractor(range), ...(focused < 0 ? [] : [focused])])].sort((a, b) => a - b);
  };
  const rows = useVirtualizer({
    count: shown.length,
    getScrollElement: () => box,
    getItemKey: (index) => shown[index]?.id ?? index,
    estimateSize: () => ROW_PX,
    overscan: OVERSCAN,
    rangeExtractor: keepFocused,
  });
  const latest = useRef(overlaid);
  latest.current = overlaid;
  const changeView = useChangeView();
  const toggleLayers = useCallback(
    (id: string) => {
      const others = [...latest.current].filter((each) => each !== id);
      changeView(overlaying(latest.current.has(id) ? others : [...others, id]));
    },
    [changeView],
  );
  return (
    <>
      <div className="row spread">
        <p className="hint">
          Changes are from {names.get(base.id)}; below a value stands its 95 % interval. “Against the baseline” is a
          paired test of the KL divergence on the same tokens. A run is Pareto-optimal if no other run of its model is
          both smaller and better.
          {isMixed && " Runs of another model are compared only by perplexity relative to their own original."}
        </p>
        <button type="button" onClick={() => saveFile("comparison.csv", asFile(csvOf(shown, names, optimal)))}>
          Save as CSV
        </button>
      </div>
      <PairedTest jobs={shown} base={base} />
      <div className="table results" ref={scrolledBox}>
        <table aria-rowcount={shown.length + 1}>
          <thead>
            <tr aria-rowindex={1}>
              <th>Run</th>
              <th>Verdict</th>
              <th>
                <Term>Against the baseline</Term>
              </th>
              {metrics.map((row) => (
                <SortHead key={row.id} row={row} order={order} />
              ))}
              <ActionsHead />
            </tr>
          </thead>
          <tbody
            style={{ height: rows.getTotalSize() }}
            onFocus={({ target }) => setFocusedId(shown[Number(target.closest("tr")?.dataset.index)]?.id)}
          >
            {rows.getVirtualItems().map(({ index, start }) => {
              const job = shown[index] as Job;
              return (
                <tr
                  key={job.id}
                  ref={rows.measureElement}
                  data-index={index}
                  aria-rowindex={index + 2}
                  className={job === base ? "cursor" : undefined}
                  style={{ transform: `translateY(${start}px)` }}
                >
                  <RunCells
                    job={job}
                    base={base}
                    name={names.get(job.id) ?? job.id}
                    isOfMixed={isMixed}
                    metrics={metrics}
                    isOptimal={optimal.has(job.id)}
                    isOverlaid={overlaid.has(job.id)}
                    isFull={overlaid.size >= MAX_OVERLAID}
                    toggleLayers={toggleLayers}
                    isNamed={isNamed}
                  />
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </>
  );
}

/** The command that measures two runs of a model again: for those without a paired test here, or on more text. */
function PairedTest({ jobs, base }: { jobs: Job[]; base: Job }) {
  const other = jobs.find((job) => job !== base && modelOf(job) === modelOf(base));
  if (!other) return null;
  const command = [
    ...[base, other].map((job) => `bitfoundry download ${job.id}`),
    `bitfoundry compare ./${other.id} ./${base.id} --against ${quoted(modelOf(base))}`,
  ].join(" && ");
  return (
    <details>
      <summary>Runs that are not tested: measure two again on the same tokens</summary>
      <p className="hint">
        Two runs are tested if both were measured on the same text, window by window. This command measures both again,
        on more text than a run, and finds smaller changes.
      </p>
      <Code text={command} label="Paired test" />
    </details>
  );
}

const asFile = (text: string) => new Blob([text], { type: "text/csv" });

function SortHead({ row, order }: { row: Row; order: string | null }) {
  const changeView = useChangeView();
  const sign = order === row.id ? "ascending" : order === `-${row.id}` ? "descending" : undefined;
  return (
    <th className="number" aria-sort={sign}>
      <button
        type="button"
        className="link"
        title={TERMS[row.text] ? `${TERMS[row.text]} Click to sort.` : "Click to sort."}
        onClick={() => changeView({ sort: sign === "ascending" ? `-${row.id}` : row.id })}
      >
        {row.text}
        {sign && <span aria-hidden="true"> {sign === "ascending" ? "↑" : "↓"}</span>}
      </button>
    </th>
  );
}

const RunCells = memo(function RunCells({
  job,
  base,
  name,
  isOfMixed,
  metrics,
  isOptimal,
  isOverlaid,
  isFull,
  toggleLayers,
  isNamed,
}: {
  job: Job;
  base: Job;
  name: string;
  isOfMixed: boolean;
  metrics: Row[];
  isOptimal: boolean;
  isOverlaid: boolean;
  isFull: boolean;
  toggleLayers: (id: string) => void;
  isNamed: boolean;
}) {
  const changeView = useChangeView();
  const result = useChange(job, base);
  const verdict = summaryOf(job)?.verdict;
  const remove = () => changeView((now) => ({ job: now.job?.filter((id) => id !== job.id) }));
  return (
    <>
      <th scope="row">
        <Link to="/jobs/$id" params={{ id: job.id }}>
          {name}
        </Link>
        <div className="sub">
          {job === base && <strong>baseline </strong>}
          {isOfMixed && `${shortName(modelOf(job))} `}
          {!name.includes(schemeOf(job)) && `${schemeOf(job)} `}
          {job.state !== "succeeded" && <StateLabel state={job.state} />}
        </div>
        {isOptimal && <div className="sub">✓ Pareto-optimal</div>}
      </th>
      <td>{verdict ? <VerdictLevel level={verdict.level} /> : "–"}</td>
      <td>{result ? <Tested result={result} /> : "–"}</td>
      {metrics.map((row) => (
        <Cell key={row.id} row={row} job={job} base={base} paired={result?.change ?? null} />
      ))}
      <td>
        <div className="row">
          {hasLayers(job) && (
            <label className="row">
              <input
                type="checkbox"
                aria-label={`Show layers of ${name}`}
                checked={isOverlaid}
                disabled={isFull && !isOverlaid}
                onChange={() => toggleLayers(job.id)}
              />
              Layers
            </label>
          )}
          {isNamed && (
            <button type="button" className="small" aria-label={`Remove ${name}`} onClick={remove}>
              ✕
            </button>
          )}
          {job !== base && (
            <button type="button" className="small" onClick={() => changeView({ base: job.id })}>
              Set as baseline
            </button>
          )}
        </div>
      </td>
    </>
  );
});

/** Whether a run is better or worse than the baseline on the same tokens, or why that is not known. */
function Tested({ result: { change, not_tested } }: { result: ResultChange }) {
  if (!change) {
    return (
      <>
        not tested <div className="sub">{not_tested}</div>
      </>
    );
  }
  const { text, tone, interval } = verdictOf(change);
  return (
    <>
      <strong className={tone}>{text}</strong>
      <div className="sub">{interval}</div>
    </>
  );
}

function valueIn(row: Row, job: Job) {
  const summary = summaryOf(job);
  return summary && row.value(summary);
}

function stderrOf(row: Row, job: Job): number {
  const summary = summaryOf(job);
  return (summary && row.stderr?.(summary)) || 0;
}

/** The text with each number and its % on one line, where a narrow column breaks it. */
const unbroken = (text: string) => text.replaceAll(" %", "\u00a0%");

function Cell({ row, job, base, paired }: { row: Row; job: Job; base: Job; paired: PairedChange | null }) {
  const value = valueIn(row, job);
  const baseValue = valueIn(row, base);
  if (value == null) return <td className="number">–</td>;
  const stderr = stderrOf(row, job);
  const half = halfInterval(stderr);
  const isShare = row.scale === "points";
  const ends = isShare && half ? [row.format(value - half), row.format(value + half)] : endsOf({ value, stderr });
  const isComparable = job !== base && baseValue != null && (row.ofAnyModel || modelOf(job) === modelOf(base));
  const change = isComparable ? changeOf(row, value, baseValue, [stderr, stderrOf(row, base)], paired) : null;
  return (
    <td className="number">
      {row.format(value)}
      {ends && <div className="sub">{unbroken(ends.join(" to "))}</div>}
      {change && <div className={`sub ${change.tone}`}>{unbroken(change.text)}</div>}
    </td>
  );
}
