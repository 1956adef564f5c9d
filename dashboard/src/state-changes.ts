import { useEffect, useRef } from "react";
import type { Job, State } from "./api/types";

/** Calls `onChange` with those of the runs on the page that have changed their state since they were last seen. */
export function useStateChanges(jobs: Job[], onChange: (changed: Job[]) => void) {
  const before = useRef(new Map<string, State>());
  const latest = useRef(onChange);
  latest.current = onChange;
  useEffect(() => {
    const changed = jobs.filter((job) => {
      const old = before.current.get(job.id);
      return old && old !== job.state;
    });
    before.current = new Map(jobs.map((job) => [job.id, job.state]));
    if (changed.length) latest.current(changed);
  }, [jobs]);
}
