// The verdict on a result and the intervals that belong to it.
import type { Level, Measured, Summary } from "../../api/types";
import { formatLoss, formatNumber } from "../../format";
import { halfInterval } from "../compare/change";

/** "KL divergence between 0.10 and 0.21" */
export function divergenceText({ kl_mean: mean, kl_stderr: stderr }: Pick<Summary, "kl_mean" | "kl_stderr">) {
  if (mean == null) return "";
  const ends = endsOf({ value: mean, stderr: stderr ?? null });
  return `KL divergence ${ends ? `between ${ends[0]} and ${ends[1]}` : formatNumber(mean, 3)}`;
}

/** "Perplexity between +0.10 % and +0.74 %": measured on the same tokens as the original's. */
export function ratioText({ value, stderr }: Measured) {
  if (value == null) return "";
  const half = halfInterval(stderr);
  const show = (ratio: number) => formatLoss(ratio - 1);
  return `Perplexity ${half ? `between ${show(value - half)} and ${show(value + half)}` : show(value)}`;
}

/** "0.0123 (0.011 to 0.014)": a measurement and its 95 % interval. */
export function measuredText(measured: Measured, digits: number, isPerplexity = false) {
  const ends = endsOf(measured, isPerplexity);
  return `${formatNumber(measured.value, digits)}${ends ? ` (${ends[0]} to ${ends[1]})` : ""}`;
}

/** The ends of a 95 % interval, rounded outwards to the first digit of its half, as the reports have them. */
export function endsOf({ value, stderr }: Measured, isPerplexity = false): [string, string] | null {
  const half = halfInterval(stderr);
  if (value == null || !half) return null;
  const decimals = Math.max(0, -Math.floor(Math.log10(half)));
  const scale = 10 ** decimals;
  const [low, high] = isPerplexity
    ? perplexitiesAround(value, half)
    : [value < 0 ? value - half : Math.max(0, value - half), value + half];
  const show = (end: number) =>
    (end / scale).toLocaleString(undefined, { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return [show(Math.floor(low * scale + 1e-9)), show(Math.ceil(high * scale - 1e-9))];
}

/** The interval of a perplexity: that of its logarithm. It is never below 1. */
const perplexitiesAround = (value: number, half: number): [number, number] => {
  const factor = Math.exp(half / value);
  return [Math.max(1, value / factor), value * factor];
};

const TONES: Record<Level, string> = {
  faithful: "good",
  good: "good",
  unclear: "warn",
  degraded: "warn",
  broken: "bad",
};
/** From the best to the worst. */
export const LEVELS = Object.keys(TONES) as Level[];
/** The tone of a verdict; "" for a level that only a newer service knows. */
export const toneOf = (level: string) => TONES[level as Level] ?? "";
