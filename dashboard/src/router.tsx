// Routing below /ui with the history of the browser. The address holds what a page shows, so that links can be shared.
import { type AnchorHTMLAttributes, type MouseEvent, useMemo, useSyncExternalStore } from "react";

export const BASE = "/ui";
const CHANGED = "bitfoundry:navigated";

function subscribe(listener: () => void) {
  window.addEventListener("popstate", listener);
  window.addEventListener(CHANGED, listener);
  return () => {
    window.removeEventListener("popstate", listener);
    window.removeEventListener(CHANGED, listener);
  };
}

export interface Place {
  path: string;
  search: URLSearchParams;
}

export function usePlace(): Place {
  const href = useSyncExternalStore(subscribe, () => window.location.pathname + window.location.search);
  return useMemo(() => {
    const url = new URL(href, window.location.origin);
    return { path: url.pathname.replace(BASE, "") || "/", search: url.searchParams };
  }, [href]);
}

export function navigate(to: string, { replace = false } = {}) {
  window.history[replace ? "replaceState" : "pushState"](null, "", BASE + to);
  window.dispatchEvent(new Event(CHANGED));
}

/** The query string with changed parameters: null removes one, a list sets several values. */
export function withParams(search: URLSearchParams, changes: Record<string, string | string[] | null>): string {
  const next = new URLSearchParams(search);
  for (const [name, value] of Object.entries(changes)) {
    next.delete(name);
    for (const each of value === null ? [] : [value].flat()) next.append(name, each);
  }
  const text = next.toString();
  return text ? `?${text}` : "";
}

export function Link({ to, ...rest }: { to: string } & AnchorHTMLAttributes<HTMLAnchorElement>) {
  const follow = (event: MouseEvent<HTMLAnchorElement>) => {
    rest.onClick?.(event);
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    navigate(to);
  };
  return <a {...rest} href={BASE + to} onClick={follow} />;
}
