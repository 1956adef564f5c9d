import { useEffect, useRef, useState } from "react";
import { address, get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, LogLine, LogPage } from "../../api/types";
import { capitalize, formatTime } from "../../format";
import { BASE } from "../../router";
import { Empty, Failure, Loading } from "../../ui/basics";
import { FINAL_STATES } from "../../ui/states";

const LEVELS = ["debug", "info", "warning", "error"];
const PAGE = 1000;
const MAX_SHOWN = 5000;
const AROUND = 200;
const EVERY_MS = 1500;
const ICONS: Record<string, string> = { error: "✕", warning: "⚠" };

/** The newest log lines, or those around a linked line; then new lines as they arrive. */
export function Log({ job, line }: { job: Job; line: number | null }) {
  const [level, setLevel] = useState("debug");
  const [follows, setFollows] = useState(line === null);
  const [lines, setLines] = useState<LogLine[]>([]);
  const last = useRef(0);
  const box = useRef<HTMLDivElement>(null);
  const isOver = FINAL_STATES.has(job.state);

  // biome-ignore lint/correctness/useExhaustiveDependencies: each of the three selects other lines
  useEffect(() => {
    last.current = 0;
    setLines([]);
  }, [job.id, level, line]);

  const query = useQuery(
    `log ${job.id} ${level} ${line}`,
    async (signal) => {
      const path = `/v1/jobs/${job.id}/logs`;
      const start = line === null ? { tail: PAGE } : { after: Math.max(0, line - AROUND) };
      const page = await get<LogPage>(path, { level, ...(last.current ? { after: last.current } : start) }, signal);
      const lastSeq = last.current;
      const fresh = page.data.filter((each) => each.seq > lastSeq);
      last.current = page.data.at(-1)?.seq ?? lastSeq;
      if (fresh.length) setLines((old) => [...old, ...fresh].slice(-MAX_SHOWN));
      return true;
    },
    { everyMs: isOver ? 0 : EVERY_MS },
  );

  // biome-ignore lint/correctness/useExhaustiveDependencies: new lines move the end
  useEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, follows]);
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
