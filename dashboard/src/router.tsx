// Addresses below /ui. The browser's own history; what a page shows is in its address, so that it can be sent to others.
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

/** `search` with other values: null takes a parameter away, a list gives it several. */
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
