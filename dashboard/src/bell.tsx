import { useNavigate } from "@tanstack/react-router";
import { useEffect, useMemo, useRef, useState, useSyncExternalStore } from "react";
import { get } from "./api/client";
import { useQuery } from "./api/query";
import type { Job, JobPage } from "./api/types";
import { addEnds, clearEnds, markSeen, parseEnds, storedEnds, subscribe } from "./ended-runs";
import { Link } from "./link";
import { noticeState, notifyEnds } from "./notices";
import { useSession } from "./sign-in";
import { Dialog, Empty, Time } from "./ui/basics";
import { NoticeChoice } from "./ui/notice-choice";
import { FINAL_STATES, STATE_ORDER } from "./ui/states";

const EVERY_MS = 5000;
const ACTIVE = STATE_ORDER.filter((state) => !FINAL_STATES.has(state));

/** The bell: the runs that have ended since this browser watches, and the choice to be told by the browser, too. */
export function Bell() {
  const projectId = useSession().key.project_id;
  const text = useSyncExternalStore(subscribe, () => storedEnds(projectId));
  const ends = useMemo(() => parseEnds(text), [text]);
  const [isOpen, setIsOpen] = useState(false);
  const navigate = useNavigate();
  useEnds((job) => {
    addEnds(projectId, [job]);
    notifyEnds([job], ({ id }) => void navigate({ to: "/jobs/$id", params: { id } }));
  });
  const numNew = ends.filter(({ isSeen }) => !isSeen).length;
  const close = () => {
    markSeen(projectId);
    setIsOpen(false);
  };
  return (
    <>
      <button type="button" className="small bell" title="Notifications" onClick={() => setIsOpen(true)}>
        <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true">
          <path d="M8 1a4 4 0 0 0-4 4v3L2.5 11h11L12 8V5a4 4 0 0 0-4-4zM6.5 12.5a1.5 1.5 0 0 0 3 0z" />
        </svg>
        <span className="hidden">Notifications</span>
        {numNew > 0 && <span className="count">{numNew} new</span>}
      </button>
      {isOpen && (
        <Dialog title="Notifications" onClose={close}>
          <NoticeChoice />
          {ends.length === 0 && <Empty>No run has ended since this browser watches.</Empty>}
          <ul className="requests">
            {ends.map(({ id, title, body, at, isSeen }) => (
              <li key={id}>
                <Link to="/jobs/$id" params={{ id }} onClick={close}>
                  {title}
                </Link>{" "}
                {!isSeen && <strong>new</strong>}
                <div className="wrap">{body}</div>
                <div className="sub">
                  <Time at={at} />
                </div>
              </li>
            ))}
          </ul>
          {ends.length > 0 && (
            <div className="actions">
              <button type="button" onClick={() => clearEnds(projectId)}>
                Clear
              </button>
            </div>
          )}
        </Dialog>
      )}
    </>
  );
}

/** Calls `onEnd` for each run that was active and has ended since; on a hidden page only if notices are on. */
function useEnds(onEnd: (job: Job) => void) {
  const params = { state: ACTIVE, limit: 100 };
  const active = useQuery("active runs", (signal) => get<JobPage>("/v1/jobs", params, signal), {
    everyMs: EVERY_MS,
    whileHidden: () => noticeState() === "on",
  });
  const before = useRef(new Set<string>());
  const latest = useRef(onEnd);
  latest.current = onEnd;
  useEffect(() => {
    if (!active.data) return;
    const now = new Set(active.data.data.filter(({ state }) => !FINAL_STATES.has(state)).map(({ id }) => id));
    const gone = [...before.current].filter((id) => !now.has(id));
    before.current = now;
    for (const id of gone) {
      get<Job>(`/v1/jobs/${id}`).then(
        (job) => FINAL_STATES.has(job.state) && latest.current(job),
        () => {}, // it was deleted
      );
    }
  }, [active.data]);
}
