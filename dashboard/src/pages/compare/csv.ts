// The table of a comparison as a file, with unrounded numbers.
import { type Job, modelOf, schemeOf, summaryOf } from "../../api/types";
import { halfInterval, ROWS } from "./change";

type Cell = string | number | null | undefined;

const HALF = "_half_interval_95";

/** One line for each run. Shares and changes are numbers, not percentages: 0.0063 is +0.63 %. */
export function csvOf(jobs: Job[], names: ReadonlyMap<string, string>, optimal: ReadonlySet<string>): string {
  const heads = ["id", "name", "model", "preset", "state", "created_at", "verdict", "pareto_optimal"];
  for (const row of ROWS) heads.push(row.id, ...(row.stderr ? [row.id + HALF] : []));
  const lines = jobs.map((job) => {
    const about: Cell[] = [job.id, names.get(job.id), modelOf(job), schemeOf(job), job.state, job.created_at];
    about.push(summaryOf(job)?.verdict?.level);
    return [...about, optimal.has(job.id) ? "yes" : "no", ...ROWS.flatMap((row) => cellsOf(row, job))];
  });
  return [heads, ...lines].map((cells) => `${cells.map(asCell).join(",")}\r\n`).join("");
}

function cellsOf(row: (typeof ROWS)[number], job: Job): Cell[] {
  const summary = summaryOf(job);
  const value = summary && row.value(summary);
  if (!row.stderr) return [value];
  const half = summary && value != null ? halfInterval(row.stderr(summary)) : 0;
  return [value, half || null];
}

/** A cell after RFC 4180. Spreadsheets run a text that begins like a formula: it gets an apostrophe. */
function asCell(value: Cell): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
