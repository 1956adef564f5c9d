// The address of a comparison: which runs it shows, and how.
import { linkOptions, useNavigate } from "@tanstack/react-router";
import { useCallback } from "react";
import type { Job } from "../../api/types";
import { NUM_LOOKS } from "../../charts/marks";
import { BASE, type CompareSearch, type FILTERS, listFiltersOf, type RunsSearch, stringifySearch } from "../../search";

export const MAX_COMPARED = 500;
/** Runs that an address names one by one. It has 41 characters for each; proxies refuse addresses of 8000. */
export const MAX_NAMED = 100;

/** Runs whose layers are shown in one chart: each has a mark of its own. */
export const MAX_OVERLAID = NUM_LOOKS;

/** The filters that choose the runs of a comparison, as API parameters. */
export type Filter = Pick<CompareSearch, (typeof FILTERS)[number] | "created_before">;

/** The runs of a comparison: those that are named, or all that the filters of the list match. */
export type Choice = { ids: string[] } | { filter: Filter };

export function readChoice(search: CompareSearch): Choice {
  const filter = { ...listFiltersOf(search), created_before: search.created_before };
  return Object.values(filter).some((value) => value !== undefined) ? { filter } : { ids: [...new Set(search.job)] };
}

export const compareLink = (ids: string[]) => linkOptions({ to: "/compare", search: { job: ids } });

/** The comparison of all results that the filters of the list match. */
export function compareAllLink(list: RunsSearch) {
  const search: CompareSearch = { ...listFiltersOf(list), state: ["succeeded"] };
  return linkOptions({ to: "/compare", search });
}

/** The link to a view, which later runs do not change: a filter ends after the newest run that is in the view. */
export function linkTo(search: CompareSearch, jobs: Job[], origin: string): string {
  const isOpen = "filter" in readChoice(search) && !search.created_before && jobs.length > 0;
  const newestMs = Math.max(...jobs.map((job) => Date.parse(job.created_at)));
  // the service's times are finer than a millisecond
  const end = isOpen ? { created_before: new Date(newestMs + 1).toISOString() } : {};
  return `${origin}${BASE}/compare${stringifySearch({ ...search, ...end })}`;
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

export const viewOf = ({ base, sort, layers, metric, kind }: CompareSearch): View => ({
  baseId: base ?? null,
  order: sort ?? null,
  overlaid: layers ?? null,
  metric: metric ?? null,
  kind: kind ?? "",
});

const NOTHING = "none";

/** The choice of runs whose layers are shown, as it is in the address. */
export const overlaying = (ids: string[]): CompareSearch => ({ layers: ids.length ? ids : [NOTHING] });

/** A function that changes what the page shows. It stays the same, so that no row of the table is drawn again. */
export function useChangeView() {
  const navigate = useNavigate({ from: "/compare" });
  return useCallback(
    (changes: CompareSearch | ((now: CompareSearch) => CompareSearch)) =>
      void navigate({
        search: (now) => ({ ...now, ...(typeof changes === "function" ? changes(now) : changes) }),
        replace: true,
      }),
    [navigate],
  );
}
