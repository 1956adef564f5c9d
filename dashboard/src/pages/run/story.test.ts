import { expect, it } from "vitest";
import type { JobEvent } from "../../api/types";
import { EMPTY, latestLayers, tell } from "./story";

let seq = 0;
const event = (kind: string, data: Record<string, unknown>): JobEvent => ({
  seq: ++seq,
  at: "2026-11-22T08:00:00Z",
  kind,
  data,
});

it("boils events down", () => {
  const events = [
    event("state_changed", { state: "running" }),
    event("phase_started", { phase: "quantize" }),
    event("layer_quantized", { name: "a", block: 0, sqnr_db: 20 }),
    event("progress", { phase: "quantize", done: 1, total: 3, unit: "block", memory_bytes: 5 }),
    event("warning", { code: "x", message: "careful" }),
  ];
  const story = tell(EMPTY, events);
  expect(story.state).toBe("running");
  expect(story.progress?.done).toBe(1);
  expect(story.memory).toEqual([{ at: Date.parse("2026-11-22T08:00:00Z"), bytes: 5 }]);
  expect(story.warnings).toEqual(["careful"]);
  expect(story.events.map((each) => each.kind)).toEqual(["state_changed", "phase_started", "warning"]);
  expect(tell(story, events).layers).toHaveLength(1); // told twice, counted once
  expect(tell(story, [event("phase_started", { phase: "export" })]).progress).toBeNull();
});

it("takes a layer's numbers from the last attempt", () => {
  const layer = (name: string, sqnr_db: number) => ({ name, sqnr_db, block: 0, relative_error: 0, scheme: "" });
  expect(latestLayers([layer("a", 1), layer("b", 2), layer("a", 3)]).map((each) => each.sqnr_db)).toEqual([3, 2]);
});
