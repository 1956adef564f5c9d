import { expect, it } from "vitest";
import type { Phase, Progress } from "../../api/types";
import { jobLeftText } from "../job-progress";
import { continuesText, failedText, remainingText, resumesText, timeline } from "./timeline";

const at = (second: number) => new Date(second * 1000).toISOString();
const phase = (name: string, start: number, end: number | null, more: Partial<Phase> = {}): Phase => ({
  name,
  state: end === null ? "running" : "done",
  started_at: at(start),
  ended_at: end === null ? null : at(end),
  done: null,
  total: null,
  unit: null,
  ...more,
});
const RUNNING = { state: "running" as const, phases: [phase("resolve", 0, 1), phase("plan", 1, 3)] };

it("shows the phases that are still to come", () => {
  const job = { ...RUNNING, phases: [...RUNNING.phases, phase("quantize", 3, null)] };
  const steps = timeline(job, 10_000);
  expect(steps.map(({ name, state, seconds }) => [name, state, seconds])).toEqual([
    ["resolve", "done", 1],
    ["plan", "done", 2],
    ["quantize", "running", 7],
    ["export", "coming", 0],
    ["verify", "coming", 0],
  ]);
  expect(timeline({ ...RUNNING, phases: [], mix: {} }, 0).map(({ name }) => name)).toContain("sensitivity");
  const config = { algo_config: [{ name: "yaqa" }] };
  expect(timeline({ ...RUNNING, config }, 0)[2]).toMatchObject({ name: "gradients", state: "coming" });
  expect(timeline({ ...job, state: "succeeded" }, 10_000)).toHaveLength(3);
  expect(timeline({ ...job, goal: {} }, 10_000)).toHaveLength(3);
});

it("adds up the rounds of a phase that a search repeats", () => {
  const phases = [phase("trial", 0, 1), phase("quantize", 1, 4), phase("trial", 4, 5), phase("quantize", 5, null)];
  const steps = timeline({ state: "running", phases, goal: {} }, 9_000);
  expect(steps.map(({ name, seconds, rounds, state }) => [name, seconds, rounds, state])).toEqual([
    ["trial", 2, 2, "done"],
    ["quantize", 7, 2, "running"],
  ]);
});

it("says what an estimate is of, and what follows", () => {
  const progress: Progress = { phase: "quantize", done: 3, total: 30, unit: "block", eta_s: 40 };
  const steps = timeline({ ...RUNNING, phases: [phase("quantize", 3, null)] }, 9_000);
  expect(remainingText(progress, steps)).toBe("block 3 of 30 · 40 s left in quantize, then export and verify");
  expect(remainingText({ ...progress, eta_s: null }, [])).toBe("block 3 of 30");
});

it("says what is left of the whole run, and nothing where nothing is known", () => {
  const progress: Progress = { phase: "quantize", done: 3, total: 30, unit: "block", eta_s: 40 };
  expect(jobLeftText({ eta_s: 351 }, progress)).toBe("about 6 min left");
  expect(jobLeftText({ eta_s: 38 }, null)).toBe("about 40 s left");
  expect(jobLeftText({ eta_s: 12 }, progress)).toBe("about 40 s left"); // the phase alone takes longer
  expect(jobLeftText({ eta_s: null }, progress)).toBe("");
});

it("says where a run has failed", () => {
  const stopped = phase("quantize", 3, 7, { state: "stopped", done: 3, total: 30, unit: "block" });
  expect(failedText({ state: "failed", phases: [stopped] })).toBe("Failed in quantize, at block 3 of 30, after 4 s");
  expect(failedText({ state: "failed", phases: [] })).toBe("Failed before its first phase");
});

it("says where a stopped run continues", () => {
  const saved = { next_block: 12, num_blocks: 30 };
  const paused = { state: "paused" as const, attempt: 1 };
  const text = (job: Parameters<typeof continuesText>[0], at: typeof saved | null) => continuesText(job, at, 0);
  expect(text(paused, saved)).toMatch(/^It continues after block 12 of 30, on a worker with the same disk/);
  expect(text(paused, null)).toMatch(/^It starts from the beginning: no block was saved/);
  expect(text({ ...paused, goal: {} }, saved)).toMatch(/^It continues where it stopped/);
  expect(text({ ...paused, state: "failed" }, saved)).toMatch(/^A retry starts from the beginning/);
  expect(text({ state: "queued", attempt: 0 }, null)).toBe("");
  expect(text({ state: "running", attempt: 1 }, saved)).toBe("");
});

it("offers to resume a failed run as long as its progress is kept", () => {
  const saved = { next_block: 12, num_blocks: 30 };
  const failed = { state: "failed" as const, attempt: 3, progress_kept_until: "2026-11-27T12:00:00Z" };
  const noon = Date.parse("2026-11-27T12:00:00Z");
  expect(resumesText(failed, saved, noon)).toBe("Resume after block 12 of 30");
  expect(continuesText(failed, saved, noon)).toMatch(/^Saved progress is kept until .* on a worker with the same disk/);
  for (const [job, at, now] of [
    [failed, saved, noon + 1],
    [failed, null, noon],
    [{ ...failed, progress_kept_until: null }, saved, noon],
  ] as const) {
    expect(resumesText(job, at, now)).toBe("");
    expect(continuesText(job, at, now)).toMatch(/^A retry starts from the beginning/);
  }
  expect(resumesText({ ...failed, goal: {} }, null, noon)).toBe("Resume");
});
