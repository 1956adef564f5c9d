// The verdict on a result and the intervals that belong to it.
import type { Level, Measured, Summary } from "../../api/types";
import { formatLoss, formatNumber } from "../../format";
import { halfInterval } from "../compare/change";

/** "KL divergence 0.0123, 95 % interval 0.0119 to 0.0127" */
export function divergenceText({ kl_mean: mean, kl_stderr: stderr }: Pick<Summary, "kl_mean" | "kl_stderr">) {
  if (mean == null) return "";
  const show = (value: number) => formatNumber(Math.max(0, value), 3);
  return `KL divergence ${withInterval(mean, stderr, show)}`;
}

/** "Perplexity +0.42 %, 95 % interval +0.10 % to +0.74 %": measured on the same tokens as the original's. */
export function ratioText({ value, stderr }: Measured) {
  if (value == null) return "";
  const show = (ratio: number) => formatLoss(ratio - 1);
  return `Perplexity ${withInterval(value, stderr, show)}`;
}

/** "0.0123 ± 0.0004": a measurement and half of its 95 % interval. */
export const measuredText = ({ value, stderr }: Measured, digits: number) =>
  `${formatNumber(value, digits)}${stderr ? ` ± ${formatNumber(halfInterval(stderr), 2)}` : ""}`;

function withInterval(value: number, stderr: number | null | undefined, show: (value: number) => string) {
  const half = halfInterval(stderr);
  return half ? `${show(value)}, 95 % interval ${show(value - half)} to ${show(value + half)}` : show(value);
}

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
