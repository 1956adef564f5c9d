import { beforeEach, expect, it, vi } from "vitest";
import type { Job } from "./api/types";
import { chooseNotices, noticeState, noticeText, notifyEnds } from "./notices";

const stored = new Map<string, string>();
const shown: [string, NotificationOptions][] = [];
let page: { hidden: boolean };

class FakeNotification {
  static permission: NotificationPermission = "default";
  static asked: NotificationPermission = "granted";
  static async requestPermission() {
    FakeNotification.permission = FakeNotification.asked;
    return FakeNotification.permission;
  }
  constructor(title: string, options: NotificationOptions) {
    shown.push([title, options]);
  }
}

const run = (fields: object) =>
  ({ id: "job_1", name: "nightly", state: "succeeded", summary: null, error: null, ...fields }) as unknown as Job;
const GOOD = run({ summary: { verdict: { level: "good", reason: "KL divergence 0.01" } } });

beforeEach(() => {
  stored.clear();
  shown.length = 0;
  FakeNotification.permission = "default";
  FakeNotification.asked = "granted";
  page = { hidden: true };
  vi.stubGlobal("document", page);
  vi.stubGlobal("Notification", FakeNotification);
  vi.stubGlobal("window", { isSecureContext: true, Notification: FakeNotification });
  vi.stubGlobal("localStorage", {
    getItem: (key: string) => stored.get(key) ?? null,
    setItem: (key: string, value: string) => stored.set(key, value),
    removeItem: (key: string) => stored.delete(key),
  });
});

it("says the verdict with its reason, or the error", () => {
  expect(noticeText(GOOD)).toEqual({ title: "nightly: Succeeded", body: "good: KL divergence 0.01" });
  const goal = { is_met: false, why: "nothing that fits keeps 97 %" };
  const missed = run({ summary: { ...GOOD.summary, goal } });
  expect(noticeText(missed).body).toBe("goal missed: nothing that fits keeps 97 %. good: KL divergence 0.01");
  expect(noticeText(run({ summary: { ...GOOD.summary, goal: { ...goal, is_met: true } } })).body).toMatch(/^good/);
  const failed = run({ state: "failed", error: { code: "x", message: "The model is gated." } });
  expect(noticeText(failed)).toEqual({ title: "nightly: Failed", body: "The model is gated." });
  expect(noticeText(run({ state: "cancelled" })).body).toBe("");
});

it("is off until it is chosen, and shows ends on a hidden page alone", async () => {
  notifyEnds([GOOD], () => {});
  expect(shown).toEqual([]);
  expect(await chooseNotices(true)).toBe("on");
  notifyEnds([GOOD, run({ id: "job_2", state: "running" })], () => {});
  page.hidden = false;
  notifyEnds([GOOD], () => {});
  expect(shown).toEqual([["nightly: Succeeded", { body: "good: KL divergence 0.01", tag: "job_1" }]]);
  expect(await chooseNotices(false)).toBe("off");
  expect(stored.size).toBe(0);
});

it("knows that the browser blocks it, or cannot be asked", async () => {
  FakeNotification.asked = "denied";
  expect(await chooseNotices(true)).toBe("blocked");
  expect(stored.size).toBe(0);
  FakeNotification.permission = "default"; // as after a reset of the site's settings
  stored.set("bitfoundry.notices", "on");
  expect(noticeState()).toBe("off");
  vi.stubGlobal("window", { isSecureContext: false });
  expect(noticeState()).toBe("unavailable");
});
