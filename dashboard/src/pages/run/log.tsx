import { useEffect, useRef, useState } from "react";
import { address, get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, LogLine, LogPage } from "../../api/types";
import { capitalize, formatTime } from "../../format";
import { BASE } from "../../search";
import { Empty, Failure, Loading } from "../../ui/basics";
import { FINAL_STATES } from "../../ui/states";

const LEVELS = ["debug", "info", "warning", "error"];
const PAGE = 1000;
const MAX_SHOWN = 5000;
const AROUND = 200;
const EVERY_MS = 1500;
const ICONS: Record<string, string> = { error: "✕", warning: "⚠" };

/** The lines after the `old` ones; without those, the newest lines, or those around `line`. */
async function readOn(path: string, level: string, line: number | null, old: LogLine[], signal: AbortSignal) {
  const lastSeq = old.at(-1)?.seq;
  const start = line === null ? { tail: PAGE } : { after: Math.max(0, line - AROUND) };
  const { data } = await get<LogPage>(path, { level, ...(lastSeq ? { after: lastSeq } : start) }, signal);
  const fresh = data.filter(({ seq }) => seq > (lastSeq ?? 0));
  return fresh.length ? [...old, ...fresh].slice(-MAX_SHOWN) : old;
}

/** The newest log lines, or those around a linked line; then new lines as they arrive. */
export function Log({ job, line }: { job: Job; line: number | null }) {
  const [level, setLevel] = useState("debug");
  const [follows, setFollows] = useState(line === null);
  const box = useRef<HTMLDivElement>(null);
  const isOver = FINAL_STATES.has(job.state);

  const query = useQuery(
    `log ${job.id} ${level} ${line}`,
    (signal, old: LogLine[] = []) => readOn(`/v1/jobs/${job.id}/logs`, level, line, old, signal),
    { everyMs: isOver ? 0 : EVERY_MS },
  );
  const lines = query.data ?? [];

  // biome-ignore lint/correctness/useExhaustiveDependencies: the last lines may have come after the last reading
  useEffect(() => {
    if (isOver && query.data) query.reload();
  }, [isOver]);
  // biome-ignore lint/correctness/useExhaustiveDependencies: new lines move the end
  useEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [query.data, follows]);
  const hasLines = lines.length > 0;
  useEffect(() => {
    if (line !== null && hasLines) document.getElementById(`L${line}`)?.scrollIntoView({ block: "center" });
  }, [line, hasLines]);

  const stopAtScroll = () => {
    const shown = box.current;
    if (shown) setFollows(shown.scrollHeight - shown.scrollTop - shown.clientHeight < 30);
  };
  return (
    <section className="card">
      <div className="row spread">
        <label className="row">
          Level
          <select value={level} onChange={(event) => setLevel(event.target.value)}>
            {LEVELS.map((each) => (
              <option key={each} value={each}>
                {each === "debug" ? "All levels" : `${capitalize(each)} and above`}
              </option>
            ))}
          </select>
        </label>
        <label className="row">
          <input type="checkbox" checked={follows} onChange={(event) => setFollows(event.target.checked)} /> Follow
        </label>
        <a className="button" href={address(`/v1/jobs/${job.id}/logs/download`, { level })} download>
          Download
        </a>
      </div>
      {query.error && !lines.length && <Failure error={query.error} retry={query.reload} />}
      {!query.data && !query.error && <Loading />}
      {query.data && !lines.length && (
        <Empty>{level === "debug" ? "No log lines yet." : "No log lines at this level."}</Empty>
      )}
      {lines.length > 0 && (
        <div
          className="log"
          ref={box}
          onWheel={stopAtScroll}
          onKeyUp={stopAtScroll}
          // biome-ignore lint/a11y/noNoninteractiveTabindex: the keyboard must be able to scroll it
          tabIndex={0}
          role="log"
          aria-live="off"
          aria-label="Run log"
        >
          {lines.map((each) => (
            <div key={each.seq} id={`L${each.seq}`} className={each.seq === line ? "marked" : undefined}>
              <a
                href={`${BASE}/jobs/${job.id}?tab=log&line=${each.seq}`}
                title="Link to this line"
                aria-label={`Line ${each.seq}`}
              >
                {each.seq}
              </a>
              <time dateTime={each.at} title={formatTime(each.at)}>
                {new Date(each.at).toLocaleTimeString()}
              </time>
              <span className={each.level === "error" ? "bad" : each.level === "warning" ? "warn" : "faint"}>
                {ICONS[each.level] ?? ""} {each.level}
              </span>
              <span>{each.text}</span>
            </div>
          ))}
        </div>
      )}
    </section>
  );
}
