// A job's events, as they come, boiled down to what the page shows.
import { useEffect, useReducer, useState } from "react";
import { follow, type Link } from "../../api/stream";
import type { JobEvent, Layer, Progress, State } from "../../api/types";

export interface Story {
  layers: Layer[];
  progress: Progress | null;
  state: State | null;
  warnings: string[];
  /** All but the numbers of layers and progress: what a person would call an event. */
  events: JobEvent[];
  memory: { at: number; bytes: number }[];
  lastSeq: number;
}

export const EMPTY: Story = {
  layers: [],
  progress: null,
  state: null,
  warnings: [],
  events: [],
  memory: [],
  lastSeq: 0,
};

/** The story with more events. A new attempt quantizes its layers anew, or goes on behind those that are saved. */
export function tell(story: Story, events: JobEvent[]): Story {
  const next: Story = {
    ...story,
    layers: [...story.layers],
    warnings: [...story.warnings],
    events: [...story.events],
    memory: [...story.memory],
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
    if (event.kind === "state_changed") {
      next.state = data.state as State;
      if (data.state !== "running") next.progress = null;
    }
    if (event.kind === "phase_started") next.progress = null;
    if (event.kind === "warning") next.warnings.push(String(data.message));
    next.events.push(event);
  }
  return next;
}

/** Of layers that were quantized more than once, by several attempts, the last numbers. */
export function latestLayers(layers: Layer[]): Layer[] {
  return [...new Map(layers.map((layer) => [layer.name, layer])).values()];
}

/** Events are gathered and told once a frame: a stored story comes in thousands. */
export function useStory(jobId: string, round: number): { story: Story; link: Link } {
  const [story, dispatch] = useReducer(
    (old: Story, events: JobEvent[] | null) => (events ? tell(old, events) : EMPTY),
    EMPTY,
  );
  const [link, setLink] = useState<Link>("open");
  // biome-ignore lint/correctness/useExhaustiveDependencies: another round follows the job again
  useEffect(() => {
    const controller = new AbortController();
    let waiting: JobEvent[] = [];
    let timer = 0;
    const gather = (events: JobEvent[]) => {
      waiting.push(...events);
      timer ||= window.setTimeout(() => {
        timer = 0;
        dispatch(waiting);
        waiting = [];
      }, 50);
    };
    dispatch(null);
    void follow(jobId, gather, setLink, controller.signal);
    return () => {
      controller.abort();
      window.clearTimeout(timer);
    };
  }, [jobId, round]);
  return { story, link };
}
