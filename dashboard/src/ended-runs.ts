// The runs that ended while a page of this browser was open, newest first: the history behind the bell. Bounded.
import type { Job } from "./api/types";
import { noticeText } from "./notices";

const PREFIX = "bitfoundry.ended.";
const MAX_KEPT = 30;

export interface EndedRun {
  id: string;
  title: string;
  body: string;
  at: string | null;
  isSeen: boolean;
}

const listeners = new Set<() => void>();

/** Calls `listener` after each change, also one that another tab makes. */
export function subscribe(listener: () => void) {
  listeners.add(listener);
  window.addEventListener("storage", listener);
  return () => {
    listeners.delete(listener);
    window.removeEventListener("storage", listener);
  };
}

/** The history of a project as it is stored: text, which is the same as long as nothing changes. */
export const storedEnds = (projectId: string) => localStorage.getItem(PREFIX + projectId) ?? "[]";

export function parseEnds(text: string): EndedRun[] {
  try {
    return JSON.parse(text) as EndedRun[];
  } catch {
    return []; // not ours
  }
}

/** Adds runs that have ended. One that is there already, by another tab or a retry, moves to the top. */
export function addEnds(projectId: string, jobs: Job[]) {
  const added = jobs.map((job) => ({ id: job.id, ...noticeText(job), at: job.finished_at, isSeen: false }));
  const ids = new Set(added.map(({ id }) => id));
  const before = parseEnds(storedEnds(projectId)).filter(({ id }) => !ids.has(id));
  write(projectId, [...added, ...before].slice(0, MAX_KEPT));
}

export const markSeen = (projectId: string) =>
  write(
    projectId,
    parseEnds(storedEnds(projectId)).map((each) => ({ ...each, isSeen: true })),
  );

export const clearEnds = (projectId: string) => write(projectId, []);

function write(projectId: string, ends: EndedRun[]) {
  if (ends.length) localStorage.setItem(PREFIX + projectId, JSON.stringify(ends));
  else localStorage.removeItem(PREFIX + projectId);
  for (const listener of listeners) listener();
}
