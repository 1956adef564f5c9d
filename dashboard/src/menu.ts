// The pages as people look for them: what is worked with, and two sections with pages of their own.
import type { RegisteredRouter } from "@tanstack/react-router";

export interface MenuEntry {
  to: Exclude<keyof RegisteredRouter["routesByPath"], "/jobs/$id">;
  text: string;
  /** The permission without which the page is not offered. */
  scope?: string;
}

export interface Section {
  text: string;
  pages: MenuEntry[];
}

export const NEW_JOB: MenuEntry = { to: "/jobs/new", text: "New job", scope: "jobs:write" };

const MAIN: MenuEntry[] = [
  { to: "/models", text: "Models" },
  { to: "/", text: "Runs" },
  { to: "/compare", text: "Compare" },
  { to: "/datasets", text: "Data" },
  { to: "/registry", text: "Registry" },
];

const SECTIONS: Section[] = [
  {
    text: "Settings",
    pages: [
      { to: "/keys", text: "API keys", scope: "admin" },
      { to: "/webhooks", text: "Webhooks", scope: "admin" },
      { to: "/members", text: "Members", scope: "admin" },
      { to: "/audit", text: "Audit log", scope: "admin" },
      { to: "/project", text: "Project" },
    ],
  },
  {
    text: "Operations",
    pages: [
      { to: "/workers", text: "Workers", scope: "operator" },
      { to: "/queue", text: "Queue" },
      { to: "/system", text: "System" },
    ],
  },
];

/** The entries and sections that a key with `scopes` can open. */
export function menuFor(scopes: string[]) {
  const isAllowed = ({ scope }: MenuEntry) => !scope || scopes.includes(scope);
  const sections = SECTIONS.map((section) => ({ ...section, pages: section.pages.filter(isAllowed) }));
  return { main: MAIN, sections, newJob: isAllowed(NEW_JOB) ? NEW_JOB : undefined };
}

export const isShown = (to: string, path: string) =>
  to === "/" ? path === "/" || /^\/jobs(\/|$)/.test(path) : path === to;

export const sectionOf = (sections: Section[], path: string) =>
  sections.find(({ pages }) => pages.some(({ to }) => to === path));

/** The entries whose text has every word of `query`, in the given order. */
export function matching<T extends { text: string; hint?: string }>(entries: T[], query: string): T[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return entries.filter(({ text, hint = "" }) => {
    const whole = `${text} ${hint}`.toLowerCase();
    return words.every((word) => whole.includes(word));
  });
}
