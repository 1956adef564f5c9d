// Server-sent events over fetch. Unlike EventSource, it receives every kind of event and reports why a stream failed.
import { open, Problem, Unreachable } from "./client";
import type { JobEvent } from "./types";

export interface Message {
  id: string;
  event: string;
  data: string;
}

/** The complete messages at the start of `text`, and the rest of it. */
export function parseMessages(text: string): { messages: Message[]; rest: string } {
  const blocks = text.replaceAll("\r\n", "\n").split("\n\n");
  const rest = blocks.pop() ?? "";
  const messages: Message[] = [];
  for (const block of blocks) {
    const message: Message = { id: "", event: "message", data: "" };
    const data: string[] = [];
    for (const line of block.split("\n")) {
      const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
      if (name === "id") message.id = value ?? "";
      else if (name === "event") message.event = value ?? "";
      else if (name === "data") data.push(value ?? "");
    }
    if (data.length) messages.push({ ...message, data: data.join("\n") });
  }
  return { messages, rest };
}

export type Link = "open" | "lost" | "ended";

const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 10_000;

/** Pass on all events of a job from the first, over any number of connections, until it ends or `signal` aborts. */
export function follow(
  jobId: string,
  onEvents: (events: JobEvent[]) => void,
  onLink: (link: Link) => void,
  signal: AbortSignal,
): Promise<void> {
  const pass = (messages: Message[]) => {
    const events = messages.filter((each) => each.id).map((each) => JSON.parse(each.data) as JobEvent);
    if (events.length) onEvents(events);
  };
  return followMessages(`/v1/jobs/${jobId}/events/stream`, pass, onLink, signal);
}

/** Pass on the messages of a stream, over any number of connections, until it ends or `signal` aborts. */
export async function followMessages(
  path: string,
  onMessages: (messages: Message[]) => void,
  onLink: (link: Link) => void,
  signal: AbortSignal,
): Promise<void> {
  let last = "";
  let waitMs = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      const headers: Record<string, string> = last ? { "Last-Event-ID": last } : {};
      const response = await open(path, headers, signal);
      if (response.status === 204 || !response.body) return onLink("ended");
      onLink("open");
      waitMs = FIRST_WAIT_MS;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const { messages, rest } = parseMessages(text + value);
        text = rest;
        last = messages.findLast((each) => each.id)?.id ?? last;
        if (messages.length) onMessages(messages);
        if (messages.some((each) => each.event === "end")) return onLink("ended");
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status < 500) return onLink("ended");
      if (!(error instanceof Unreachable || error instanceof Problem || error instanceof TypeError)) throw error;
    }
    if (signal.aborted) return;
    onLink("lost");
    await new Promise((wake) => setTimeout(wake, waitMs));
    waitMs = Math.min(LAST_WAIT_MS, waitMs * 2);
  }
}
