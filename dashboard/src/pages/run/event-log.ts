// A job's events as they arrive, reduced to what the page shows.
import { useEffect, useReducer, useState } from "react";
import { follow, type Link } from "../../api/stream";
import type { Gate, GoalTrial, JobEvent, Layer, Progress, State, Verdict } from "../../api/types";
import type { Sample } from "./sample-texts";

export interface Saved {
  next_block: number;
  num_blocks: number;
}

/** What the checks said of a result, and for one that they rejected its verdict and samples. */
export interface Judged {
  results: Gate[];
  verdict?: Verdict | null;
  samples?: Sample[] | null;
}

export interface EventLog {
  layers: Layer[];
  progress: Progress | null;
  state: State | null;
  warnings: string[];
  /** The progress that was saved last; null if there is none, or it was deleted because the run ended well. */
  saved: Saved | null;
  judged: Judged | null;
  /** The candidates of a search for a goal that this attempt has measured. */
  trials: GoalTrial[];
  /** All events but progress, saved blocks and the metrics of layers. */
  events: JobEvent[];
  memory: { at: number; bytes: number }[];
  lastSeq: number;
}

export const EMPTY: EventLog = {
  layers: [],
  progress: null,
  state: null,
  warnings: [],
  saved: null,
  judged: null,
  trials: [],
  events: [],
  memory: [],
  lastSeq: 0,
};

/** The log with more events. A new attempt starts over, or resumes after the layers that are saved. */
export function append(log: EventLog, events: JobEvent[]): EventLog {
  const next: EventLog = {
    ...log,
    layers: [...log.layers],
    warnings: [...log.warnings],
    events: [...log.events],
    trials: [...log.trials],
    memory: [...log.memory],
  };
  for (const event of events) {
    if (event.seq <= next.lastSeq) continue;
    next.lastSeq = event.seq;
    const data = event.data as Record<string, unknown>;
    if (event.kind === "layer_quantized") {
      next.layers.push(data as unknown as Layer);
      continue;
    }
    if (event.kind === "progress") {
      next.progress = data as unknown as Progress;
      if (typeof data.memory_bytes === "number")
        next.memory.push({ at: Date.parse(event.at), bytes: data.memory_bytes });
      continue;
    }
    if (event.kind === "saved") {
      next.saved = data as unknown as Saved;
      continue;
    }
    if (event.kind === "state_changed") {
      next.state = data.state as State;
      if (data.state === "running")
        next.trials = []; // a resumed search tells again what it had measured
      else next.progress = null;
      if (["succeeded", "cancelled"].includes(next.state)) next.saved = null;
    }
    if (event.kind === "phase_started") next.progress = null;
    if (event.kind === "gates") next.judged = data as unknown as Judged;
    if (event.kind === "candidate") next.trials.push(data.trial as GoalTrial);
    if (event.kind === "warning") next.warnings.push(String(data.message));
    next.events.push(event);
  }
  return next;
}

/** The latest metrics of each layer: several attempts may have quantized it. */
export function latestLayers(layers: Layer[]): Layer[] {
  return [...new Map(layers.map((layer) => [layer.name, layer])).values()];
}

/** The event log of a job, kept up to date. Events arrive by the thousand and are applied in batches. */
export function useEventLog(jobId: string, round: number): { log: EventLog; link: Link } {
  const [log, dispatch] = useReducer(
    (old: EventLog, events: JobEvent[] | null) => (events ? append(old, events) : EMPTY),
    EMPTY,
  );
  const [link, setLink] = useState<Link>("open");
  // biome-ignore lint/correctness/useExhaustiveDependencies: another round follows the job again
  useEffect(() => {
    const controller = new AbortController();
    let waiting: JobEvent[] = [];
    let timer = 0;
    const show = () => {
      window.clearTimeout(timer);
      timer = 0;
      dispatch(waiting);
      waiting = [];
    };
    const enqueue = (events: JobEvent[]) => {
      waiting.push(...events);
      timer ||= window.setTimeout(show, 50);
    };
    const changeLink = (to: Link) => {
      show(); // who sees that the stream ended sees all its events
      setLink(to);
    };
    dispatch(null);
    setLink("open");
    void follow(jobId, enqueue, changeLink, controller.signal);
    return () => {
      controller.abort();
      window.clearTimeout(timer);
    };
  }, [jobId, round]);
  return { log, link };
}
