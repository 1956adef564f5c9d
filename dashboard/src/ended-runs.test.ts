import { beforeEach, expect, it, vi } from "vitest";
import type { Job } from "./api/types";
import { addEnds, clearEnds, markSeen, parseEnds, storedEnds, subscribe } from "./ended-runs";

const stored = new Map<string, string>();
const run = (id: string) => ({ id, name: id, state: "succeeded", finished_at: "2026-11-30T08:00:00Z" }) as Job;
const ids = (project = "p") => parseEnds(storedEnds(project)).map(({ id }) => id);

beforeEach(() => {
  stored.clear();
  vi.stubGlobal("window", { addEventListener: () => {}, removeEventListener: () => {} });
  vi.stubGlobal("localStorage", {
    getItem: (key: string) => stored.get(key) ?? null,
    setItem: (key: string, value: string) => stored.set(key, value),
    removeItem: (key: string) => stored.delete(key),
  });
});

it("keeps the newest ends of each project, each run once", () => {
  for (let number = 0; number < 40; number += 1) addEnds("p", [run(`job_${number}`)]);
  expect(ids()).toHaveLength(30);
  expect(ids()[0]).toBe("job_39");
  addEnds("p", [run("job_20")]);
  expect(ids().slice(0, 2)).toEqual(["job_20", "job_39"]);
  expect(ids().filter((id) => id === "job_20")).toHaveLength(1);
  expect(ids("other")).toEqual([]);
});

it("tells what is new, and leaves nothing behind once it is cleared", () => {
  const changes = vi.fn();
  const leave = subscribe(changes);
  addEnds("p", [run("job_1")]);
  expect(parseEnds(storedEnds("p"))).toMatchObject([{ title: "job_1: Succeeded", isSeen: false }]);
  markSeen("p");
  expect(parseEnds(storedEnds("p"))).toMatchObject([{ isSeen: true }]);
  clearEnds("p");
  expect(stored.size).toBe(0);
  expect(changes).toHaveBeenCalledTimes(3);
  leave();
  expect(parseEnds("not ours")).toEqual([]);
});
