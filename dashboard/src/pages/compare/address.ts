// The address of a comparison: which runs it shows, and how.
import type { Job } from "../../api/types";
import { NUM_LOOKS } from "../../charts/marks";
import { BASE, navigate, withParams } from "../../router";
import { FILTERS, readFilters } from "../runs/filters";

export const MAX_COMPARED = 500;
/** Runs that an address names one by one. It has 41 characters for each; proxies refuse addresses of 8000. */
export const MAX_NAMED = 100;

/** Runs whose layers are shown in one chart: each has a mark of its own. */
export const MAX_OVERLAID = NUM_LOOKS;

/** Parameters of an address: null removes one. */
export type Params = Record<string, string | string[] | null>;

/** The runs of a comparison: those that are named, or all that the filters of the list match. */
export type Choice = { ids: string[] } | { filter: Params };

const UNTIL = "created_before";

export function readChoice(search: URLSearchParams): Choice {
  if (![...FILTERS, UNTIL].some((name) => search.has(name))) return { ids: [...new Set(search.getAll("job"))] };
  return { filter: { ...readFilters(search), [UNTIL]: search.get(UNTIL) } };
}

export const compareAddress = (ids: string[]) =>
  `/compare${ids.length ? "?" : ""}${ids.map((id) => `job=${id}`).join("&")}`;

/** The comparison of all results that the filters of the list match. */
export const compareAllAddress = (search: URLSearchParams) =>
  `/compare${withParams(search, { state: "succeeded", cursor: null })}`;

/** The link to a view, which later runs do not change: a filter ends after the newest run that is in the view. */
export function linkTo(search: URLSearchParams, jobs: Job[], origin: string): string {
  const isOpen = "filter" in readChoice(search) && !search.has(UNTIL) && jobs.length > 0;
  const newestMs = Math.max(...jobs.map((job) => Date.parse(job.created_at)));
  // the service's times are finer than a millisecond
  const end: Params = isOpen ? { [UNTIL]: new Date(newestMs + 1).toISOString() } : {};
  return `${origin}${BASE}/compare${withParams(search, end)}`;
}

/** How the page shows its runs. All of it is in the address. */
export interface View {
  /** The id of the baseline; the first run without one. */
  baseId: string | null;
  /** The metric that the table is sorted by, with a minus from the largest. */
  order: string | null;
  /** The ids of the runs whose layers are shown; null without a choice. */
  overlaid: string[] | null;
  /** The metric of the layers, and their module type. */
  metric: string | null;
  kind: string;
}

export const viewOf = (search: URLSearchParams): View => ({
  baseId: search.get("base"),
  order: search.get("sort"),
  overlaid: search.has("layers") ? search.getAll("layers") : null,
  metric: search.get("metric"),
  kind: search.get("kind") ?? "",
});

const NOTHING = "none";

/** The choice of runs whose layers are shown, as it is in the address. */
export const overlaying = (ids: string[]): Params => ({ layers: ids.length ? ids : NOTHING });

/** Changes what the page shows. The same function for every view, so that no row of the table is drawn again for it. */
export function changeView(changes: Params) {
  const search = new URLSearchParams(window.location.search);
  navigate(`/compare${withParams(search, changes)}`, { replace: true });
}

/** Takes a run out of those that are named. */
export function removeRun(id: string) {
  const named = new URLSearchParams(window.location.search).getAll("job");
  changeView({ job: named.filter((each) => each !== id) });
}
