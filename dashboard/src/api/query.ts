import { useCallback, useEffect, useRef, useState } from "react";
import { Unreachable } from "./client";
import { connection } from "./connection";

export interface Query<T> {
  data: T | undefined;
  error: Error | undefined;
  reload: () => void;
}

const AGAIN_FIRST_MS = 1000;
const AGAIN_LAST_MS = 15_000;

/**
 * The result of `load`, refreshed every `everyMs` while the page is visible, and also while it is hidden if
 * `whileHidden` says so. `key` identifies the request: a new key drops the old result; with the same key it stays until
 * the next one arrives, also while the connection is lost.
 */
export function useQuery<T>(
  key: string | null,
  load: (signal: AbortSignal) => Promise<T>,
  { everyMs = 0, whileHidden = () => false }: { everyMs?: number; whileHidden?: () => boolean } = {},
): Query<T> {
  const [answer, setAnswer] = useState<{ key: string | null; data?: T; error?: Error }>({ key: null });
  const [round, setRound] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const goesOn = useRef(whileHidden);
  goesOn.current = whileHidden;

  // biome-ignore lint/correctness/useExhaustiveDependencies: `reload` starts another round
  useEffect(() => {
    if (key === null) return;
    const controller = new AbortController();
    let timer = 0;
    let failures = 0;

    const later = (ms: number) => {
      window.clearTimeout(timer);
      timer = window.setTimeout(ask, ms);
    };
    const ask = async () => {
      if (document.hidden && !goesOn.current() && failures === 0 && timer) return later(everyMs);
      try {
        const data = await latest.current(controller.signal);
        failures = 0;
        if (controller.signal.aborted) return;
        setAnswer((old) => (old.key === key && old.data === data && !old.error ? old : { key, data }));
        if (everyMs) later(everyMs);
      } catch (error) {
        if (controller.signal.aborted) return;
        failures += 1;
        setAnswer((old) => ({ key, data: old.key === key ? old.data : undefined, error: error as Error }));
        const again = error instanceof Unreachable || connection.isLost();
        if (again) later(Math.min(AGAIN_LAST_MS, AGAIN_FIRST_MS * 2 ** (failures - 1)));
        else if (everyMs) later(Math.max(everyMs, AGAIN_LAST_MS));
      }
    };
    const whenVisible = () => {
      if (!document.hidden && everyMs) later(0);
    };

    void ask();
    document.addEventListener("visibilitychange", whenVisible);
    return () => {
      controller.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", whenVisible);
    };
  }, [key, everyMs, round]);

  const reload = useCallback(() => setRound((old) => old + 1), []);
  const own = answer.key === key;
  return { data: own ? answer.data : undefined, error: own ? answer.error : undefined, reload };
}
