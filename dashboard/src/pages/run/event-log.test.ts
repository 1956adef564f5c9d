import { expect, it } from "vitest";
import type { JobEvent } from "../../api/types";
import { append, EMPTY, latestLayers } from "./event-log";

let seq = 0;
const event = (kind: string, data: Record<string, unknown>): JobEvent => ({
  seq: ++seq,
  at: "2026-11-22T08:00:00Z",
  kind,
  data,
});

it("reduces events to what the page shows", () => {
  const events = [
    event("state_changed", { state: "running" }),
    event("phase_started", { phase: "quantize" }),
    event("layer_quantized", { name: "a", block: 0, sqnr_db: 20 }),
    event("progress", { phase: "quantize", done: 1, total: 3, unit: "block", memory_bytes: 5 }),
    event("warning", { code: "x", message: "careful" }),
  ];
  const log = append(EMPTY, events);
  expect(log.state).toBe("running");
  expect(log.progress?.done).toBe(1);
  expect(log.memory).toEqual([{ at: Date.parse("2026-11-22T08:00:00Z"), bytes: 5 }]);
  expect(log.warnings).toEqual(["careful"]);
  expect(log.events.map((each) => each.kind)).toEqual(["state_changed", "phase_started", "warning"]);
  expect(append(log, events).layers).toHaveLength(1); // a repeated event counts once
  expect(append(log, [event("phase_started", { phase: "export" })]).progress).toBeNull();
});

it("keeps the block at which a stopped or failed run continues, until it ends otherwise", () => {
  const log = append(EMPTY, [
    event("saved", { next_block: 2, num_blocks: 30 }),
    event("state_changed", { state: "paused" }),
    event("state_changed", { state: "failed" }),
  ]);
  expect(log.saved).toEqual({ next_block: 2, num_blocks: 30 });
  expect(log.events.map((each) => each.kind)).toEqual(["state_changed", "state_changed"]); // one a block would hide them
  expect(append(log, [event("state_changed", { state: "cancelled" })]).saved).toBeNull();
});

it("takes a layer's numbers from the last attempt", () => {
  const layer = (name: string, sqnr_db: number) => ({ name, sqnr_db, block: 0, relative_error: 0, scheme: "" });
  expect(latestLayers([layer("a", 1), layer("b", 2), layer("a", 3)]).map((each) => each.sqnr_db)).toEqual([3, 2]);
});

it("keeps the candidates of a search, which a resumed attempt tells again", () => {
  const first = [
    { seq: 1, kind: "state_changed", data: { state: "running" } },
    { seq: 2, kind: "candidate", data: { trial: { size_bytes: 1 } } },
    { seq: 3, kind: "candidate", data: { trial: { size_bytes: 2 } } },
  ] as unknown as JobEvent[];
  const log = append(EMPTY, first);
  expect(log.trials.map(({ size_bytes }) => size_bytes)).toEqual([1, 2]);
  const again = [
    { seq: 4, kind: "state_changed", data: { state: "running" } },
    { seq: 5, kind: "candidate", data: { trial: { size_bytes: 1 } } },
  ] as unknown as JobEvent[];
  expect(append(log, again).trials).toHaveLength(1);
});
