// Reads from the service with TanStack Query, and what is kept of them until the person signs out.
import { focusManager, QueryClient, queryOptions, skipToken, useQuery as useCached } from "@tanstack/react-query";
import { useCallback } from "react";
import { Unreachable } from "./client";
import { connection } from "./connection";

export interface Query<T> {
  data: T | undefined;
  error: Error | undefined;
  reload: () => void;
}

/** Reads a result from the service. `old` is the result with the same key that is already there. */
export type Load<T> = (signal: AbortSignal, old: T | undefined) => Promise<T>;

interface Times<T> {
  /** The time from one reading to the next, 0 for one reading alone; it may depend on what was read. */
  everyMs?: number | ((data: T | undefined) => number);
  whileHidden?: () => boolean;
}

const AGAIN_FIRST_MS = 1000;
const AGAIN_LAST_MS = 15_000;

/** The browser may believe that it is offline while the service is on the same machine: requests are always tried. */
export const queryClient = new QueryClient({ defaultOptions: { queries: { networkMode: "always" } } });

/** Lets polling queries read at once when the page is seen again. Retries do not wait for that. */
export function watchVisibility() {
  focusManager.setFocused(true);
  focusManager.setEventListener((seen) => {
    const update = () => document.hidden || seen();
    document.addEventListener("visibilitychange", update);
    return () => document.removeEventListener("visibilitychange", update);
  });
  queryClient.mount();
}

const isAway = (error: Error) => error instanceof Unreachable || connection.isLost();

/** The rules of all queries, in the terms of TanStack Query. */
export function optionsOf<T>(key: string | null, load: Load<T>, { everyMs = 0, whileHidden = () => false }: Times<T>) {
  const everyMsNow = ({ state: { data } }: { state: { data?: T } }) =>
    typeof everyMs === "number" ? everyMs : everyMs(data);
  return queryOptions<T, Error, T, [string | null]>({
    queryKey: [key],
    queryFn: key === null ? skipToken : ({ signal }) => load(signal, queryClient.getQueryData<T>([key])),
    refetchInterval: (query) => (!document.hidden || whileHidden()) && everyMsNow(query),
    refetchIntervalInBackground: true,
    refetchOnWindowFocus: (query) => everyMsNow(query) > 0,
    retry: (_, error) => everyMs !== 0 || isAway(error),
    retryDelay: (count, error) =>
      isAway(error) ? Math.min(AGAIN_LAST_MS, AGAIN_FIRST_MS * 2 ** count) : AGAIN_LAST_MS,
  });
}

/**
 * The result of `load`, refreshed every `everyMs` while the page is visible, and also while it is hidden if
 * `whileHidden` says so. `key` identifies the request for the whole dashboard: a new key drops the old result; with the
 * same key it stays until the next one arrives, also while the connection is lost.
 */
export function useQuery<T>(key: string | null, load: Load<T>, times: Times<T> = {}): Query<T> {
  const { data, error, failureReason } = useCached(optionsOf(key, load, times), queryClient);
  const reload = useCallback(() => {
    const filter = { queryKey: [key], exact: true };
    // what is under way may be older than the change after which this is called, or wait for its next try
    void queryClient.cancelQueries(filter).then(() => queryClient.refetchQueries(filter));
  }, [key]);
  return { data, error: failureReason ?? error ?? undefined, reload };
}
