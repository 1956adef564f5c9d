// Numbers and times as text, in the reader's locale. Every page uses these functions, so that values look the same
// everywhere.

const formats = new Map<string, Intl.NumberFormat>(); // making one takes longer than using it

function inLocale(value: number, options: Intl.NumberFormatOptions = {}): string {
  const key = JSON.stringify(options);
  const format = formats.get(key) ?? new Intl.NumberFormat(undefined, options);
  formats.set(key, format);
  return format.format(value);
}

export function formatBytes(bytes: number | null | undefined): string {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = value >= 9.995 ? 3 : 2;
  const text =
    unit === 0 || value >= 99.95
      ? inLocale(Math.round(value))
      : inLocale(value, { minimumSignificantDigits: digits, maximumSignificantDigits: digits });
  return `${text} ${units[unit]}`;
}

export function formatNumber(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return inLocale(value);
  if (Math.abs(value) >= 10 ** digits) return inLocale(Math.round(value));
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return inLocale(value, { maximumSignificantDigits: digits, useGrouping: false });
}

/** A percentage with its sign, so that no colour is needed to tell an increase from a decrease. */
export function formatPercent(share: number, digits = 1): string {
  const value = 100 * share;
  const rounded = Number(Math.abs(value).toFixed(digits));
  const text = inLocale(rounded, { minimumFractionDigits: digits, useGrouping: false });
  return `${rounded === 0 ? "±" : value > 0 ? "+" : "−"}${text} %`;
}

/** A change of perplexity; from twice as much on without decimals, which nobody needs there. */
export const formatLoss = (change: number) => formatPercent(change, Math.abs(change) < 1 ? 2 : 0);

/** A percentage without a sign, for a share or the half of an interval. */
export const formatShare = (share: number, digits = 2) => formatPercent(share, digits).slice(1);

export function formatDuration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return "< 1 s";
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60)
    return seconds < 600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.round(hours / 24)} d`;
}

/** An estimate, no finer than it can be: "about 40 s", "about 6 min". */
export function formatEstimate(seconds: number): string {
  if (seconds < 57.5) return `about ${Math.max(5, 5 * Math.round(seconds / 5))} s`;
  if (seconds < 3570) return `about ${Math.round(seconds / 60)} min`;
  return `about ${formatDuration(600 * Math.round(seconds / 600))}`;
}

export function formatAge(milliseconds: number): string {
  const seconds = Math.round(Math.abs(milliseconds) / 1000);
  const text = (value: number, unit: string) => (milliseconds >= 0 ? `${value} ${unit} ago` : `in ${value} ${unit}`);
  if (seconds < 5) return "just now";
  if (seconds < 60) return text(seconds, "s");
  if (seconds < 3600) return text(Math.round(seconds / 60), "min");
  if (seconds < 48 * 3600) return text(Math.round(seconds / 3600), "h");
  return text(Math.round(seconds / 86400), "d");
}

export function formatTime(time: string): string {
  return new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

export const plural = (count: number, noun: string) => `${inLocale(count)} ${noun}${count === 1 ? "" : "s"}`;

export const capitalize = (text: string) => text.charAt(0).toUpperCase() + text.slice(1);

/** The last part of a path or id, which distinguishes models. */
export const shortName = (path: string) => path.split("/").filter(Boolean).at(-1) ?? path;
export const shortId = (id: string) => `${id.slice(0, 4)}…${id.slice(-6)}`;
