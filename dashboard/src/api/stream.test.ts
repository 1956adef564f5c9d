import { afterEach, expect, it, vi } from "vitest";
import { follow, parseMessages } from "./stream";
import type { JobEvent } from "./types";

const message = (seq: number) =>
  `id: ${seq}\nevent: progress\ndata: ${JSON.stringify({ seq, at: "", kind: "progress", data: {} })}\n\n`;

afterEach(() => vi.unstubAllGlobals());

it("reads whole messages and keeps the rest", () => {
  const { messages, rest } = parseMessages(`retry: 3000\n\n: nothing new\n\n${message(7)}id: 8\nev`);
  expect(messages.map((each) => [each.id, each.event])).toEqual([["7", "progress"]]);
  expect(rest).toBe("id: 8\nev");
});

it("joins lines of data, and reads other line ends", () => {
  expect(parseMessages("data: a\r\ndata: b\r\n\r\n").messages[0]?.data).toBe("a\nb");
});

it("goes on behind the last event when a connection is cut, and stops at the end", async () => {
  const lastIds: (string | undefined)[] = [];
  const bodies = [message(1) + message(2), `${message(3)}event: end\ndata: {"state": "succeeded"}\n\n`];
  vi.stubGlobal("fetch", async (_: string, init: RequestInit) => {
    lastIds.push((init.headers as Record<string, string>)["Last-Event-ID"]);
    return new Response(bodies[lastIds.length - 1], { status: 200 });
  });
  const received: JobEvent[] = [];
  const links: string[] = [];
  await follow(
    "job_1",
    (events) => received.push(...events),
    (link) => links.push(link),
    new AbortController().signal,
  );
  expect(lastIds).toEqual([undefined, "2"]);
  expect(received.map((event) => event.seq)).toEqual([1, 2, 3]);
  expect(links).toEqual(["open", "lost", "open", "ended"]);
});

it("does not come again when there is nothing to come, or no such job", async () => {
  for (const status of [204, 404]) {
    const fetched = vi.fn(async () => new Response(status === 204 ? null : "{}", { status }));
    vi.stubGlobal("fetch", fetched);
    const links: string[] = [];
    await follow(
      "job_1",
      () => {},
      (link) => links.push(link),
      new AbortController().signal,
    );
    expect(links).toEqual(["ended"]);
    expect(fetched).toHaveBeenCalledTimes(1);
  }
});
