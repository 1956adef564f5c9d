import { environmentManager, QueryObserver } from "@tanstack/react-query";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { Problem, Unreachable } from "./client";
import { type Load, optionsOf, queryClient, watchVisibility } from "./query";

environmentManager.setIsServer(() => false); // without a window it would not poll
const page = Object.assign(new EventTarget(), { hidden: false, visibilityState: "visible" });

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("document", page);
  hide(false);
  watchVisibility();
});
afterEach(() => {
  queryClient.clear();
  vi.useRealTimers();
});

const away = async () => {
  throw new Unreachable();
};

/** What a page sees of a query, and how often it was read. */
function watch<T>(load: Load<T>, times: Parameters<typeof optionsOf<T>>[2] = {}) {
  const read = vi.fn(load);
  const observer = new QueryObserver(queryClient, optionsOf("a key", read, times));
  const leave = observer.subscribe(() => undefined);
  return { read, leave, now: () => observer.getCurrentResult() };
}

/** Waits, and a little longer: TanStack Query tells its observers later. */
const after = (ms: number) => vi.advanceTimersByTimeAsync(ms + 10);

function hide(hidden: boolean) {
  Object.assign(page, { hidden, visibilityState: hidden ? "hidden" : "visible" });
  page.dispatchEvent(new Event("visibilitychange"));
}

it("polls while the page is visible, and reads at once when it is seen again", async () => {
  const { read, leave } = watch(async () => "data", { everyMs: 1000 });
  await after(3500);
  expect(read).toHaveBeenCalledTimes(4);
  hide(true);
  await after(1000); // the reading that was due
  read.mockClear();
  await after(60_000);
  expect(read).not.toHaveBeenCalled();
  hide(false);
  await after(1100);
  expect(read).toHaveBeenCalledTimes(2);
  leave();
});

it("polls a hidden page where that is wanted, and stops where the data says so", async () => {
  const numbers = [1, 2, 3];
  const { read, leave } = watch(async () => numbers.shift(), {
    everyMs: (data) => (data === 3 ? 0 : 1000),
    whileHidden: () => true,
  });
  hide(true);
  await after(60_000);
  expect(read).toHaveBeenCalledTimes(3);
  hide(false);
  await after(100);
  expect(read).toHaveBeenCalledTimes(3);
  leave();
});

it("asks a service that is away again and again, later each time, also while the page is hidden", async () => {
  const { read, leave, now } = watch<string>(away);
  await after(0);
  expect(now().failureReason).toBeInstanceOf(Unreachable); // it is told at once
  hide(true);
  await after(1000 + 2000 + 4000 + 8000);
  expect(read).toHaveBeenCalledTimes(5);
  await after(30_000);
  expect(read).toHaveBeenCalledTimes(7);
  read.mockResolvedValue("back");
  await after(15_000);
  expect(now()).toMatchObject({ data: "back", failureReason: null });
  leave();
});

it("asks again after another error only where it polls, and keeps the data", async () => {
  const problem = new Problem(403, {});
  const refused = watch(async () => Promise.reject(problem));
  await after(60_000);
  expect(refused.read).toHaveBeenCalledTimes(1);
  expect(refused.now().error).toBe(problem);
  refused.leave();
  queryClient.clear();

  const { read, leave, now } = watch(async () => "data", { everyMs: 1000 });
  await after(0);
  read.mockRejectedValueOnce(problem);
  await after(1000);
  expect(now()).toMatchObject({ data: "data", failureReason: problem });
  await after(14_000);
  expect(read).toHaveBeenCalledTimes(2);
  await after(1000);
  expect(now()).toMatchObject({ data: "data", failureReason: null });
  leave();
});

it("aborts a request that nobody waits for, and gives a request the data that is there", async () => {
  const seen: unknown[] = [];
  const first = watch(async (signal, old) => seen.push(signal, old));
  first.leave();
  expect((seen[0] as AbortSignal).aborted).toBe(true);
  const { leave, now } = watch(async (_, old: string[] = []) => [...old, "more"], { everyMs: 1000 });
  await after(1000);
  expect(now().data).toEqual(["more", "more"]);
  leave();
});
