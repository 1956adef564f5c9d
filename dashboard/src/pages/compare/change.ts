// How a value of a run differs from the baseline's, in the terms of its own scale.
import type { PairedChange, Summary } from "../../api/types";
import { formatBytes, formatDuration, formatLoss, formatNumber, formatPercent, formatShare } from "../../format";
import { LABELS } from "../../labels";

export interface Row {
  /** Its name in addresses and in files. */
  id: string;
  text: string;
  value: (summary: Summary) => number | null | undefined;
  stderr?: (summary: Summary) => number | null | undefined;
  format: (value: number) => string;
  /** Shares change by percentage points, all others by a ratio. */
  scale: "ratio" | "points" | "none";
  /** The direction of an improvement; without one a change is neither. */
  better?: "less" | "more";
  /** Whether values of different models can be compared. */
  ofAnyModel?: boolean;
  /** Changes up to this one are not worth a word, in the unit of the scale. */
  noise: number;
  /** Where a paired test finds the change of this value: worse, better, or no difference found. */
  paired?: (change: PairedChange) => PairedChange["verdict"];
  /** Whether the table of the page leaves it to the file. */
  onlyInFile?: boolean;
}

export interface Change {
  text: string;
  tone: "good" | "bad" | "";
}

const Z95 = 1.96;
const MANY = 2; // times as much: from here on a factor is clearer than a percentage

const NO_DIFFERENCE = "no difference found";

export const ROWS: Row[] = [
  {
    id: "size_bytes",
    text: "Size",
    value: (summary) => summary.size_after_bytes,
    format: formatBytes,
    scale: "ratio",
    better: "less",
    noise: 0.005,
  },
  {
    id: "perplexity_change",
    text: "Perplexity vs. original",
    value: (summary) => (summary.perplexity_ratio == null ? null : summary.perplexity_ratio - 1),
    stderr: (summary) => summary.perplexity_ratio_stderr,
    format: formatLoss,
    scale: "points",
    better: "less",
    ofAnyModel: true,
    noise: 0.0001,
    paired: ({ perplexity_ratio: { low, high } }) => (low > 1 ? "worse" : high < 1 ? "better" : NO_DIFFERENCE),
  },
  {
    id: "kl_mean",
    text: LABELS.klMean,
    value: (summary) => summary.kl_mean,
    stderr: (summary) => summary.kl_stderr,
    format: (value) => formatNumber(value, 3),
    scale: "ratio",
    better: "less",
    noise: 0.005,
    paired: ({ verdict }) => verdict,
  },
  {
    id: "perplexity",
    text: "Perplexity",
    value: (summary) => summary.perplexity_after,
    format: (value) => formatNumber(value, 5),
    scale: "none",
    noise: 0,
    onlyInFile: true,
  },
  {
    id: "worst_output_error",
    text: "Relative output error, worst layer",
    value: (summary) => summary.worst_layer.output_error ?? null,
    format: formatShare,
    scale: "points",
    better: "less",
    noise: 0.0005,
  },
  {
    id: "num_layers_quantized",
    text: "Layers quantized",
    value: (summary) => summary.num_layers_quantized,
    format: String,
    scale: "none",
    noise: 0,
    onlyInFile: true,
  },
  {
    id: "total_s",
    text: "Duration",
    value: (summary) => summary.total_s,
    format: formatDuration,
    scale: "ratio",
    noise: 0.05,
  },
  {
    id: "peak_memory_bytes",
    text: LABELS.peakMemory,
    value: (summary) => summary.peak_memory_bytes,
    format: formatBytes,
    scale: "ratio",
    noise: 0.05,
  },
];

/** Half the 95 % interval of a value. */
export const halfInterval = (stderr: number | null | undefined) => (stderr ? Z95 * stderr : 0);

/** What stands behind a change that two separate intervals do not show: on the same tokens a paired test may find it. */
const UNTESTED = "not tested";

/**
 * The change from `base` to `value`; null if there is none to speak of. The errors are standard errors.
 *
 * A paired test decides where there is one. Without it, a change beyond both errors together is beyond that of pairs,
 * too, which is smaller on the same tokens. Below it, such a change is neither better nor worse, and not nothing.
 */
export function changeOf(
  row: Row,
  value: number,
  base: number,
  errors: [number, number] = [0, 0],
  paired: PairedChange | null = null,
): Change | null {
  if (row.scale === "none") return null;
  const difference = value - base;
  const size = row.scale === "ratio" ? (base ? Math.abs(difference / base) : 0) : Math.abs(difference);
  const text = changeText(row.scale, value, base);
  if (row.paired && paired) {
    const verdict = row.paired(paired);
    const words = verdict === NO_DIFFERENCE ? `, ${verdict}` : ` ${verdict}`;
    return { text: size <= row.noise ? verdict : text + words, tone: toneOf(verdict) };
  }
  if (size <= row.noise) return null;
  if (Math.abs(difference) < halfInterval(Math.hypot(...errors))) return { text: `${text}, ${UNTESTED}`, tone: "" };
  if (!row.better) return { text, tone: "" };
  const isBetter = difference < 0 === (row.better === "less");
  return { text: `${text} ${isBetter ? "better" : "worse"}`, tone: isBetter ? "good" : "bad" };
}

/** A change in words, with its 95 % interval: the divergence decides. */
export function verdictOf({ verdict, kl_change: { low, high } }: PairedChange): Change & { interval: string } {
  const interval =
    low + 1 >= MANY
      ? `${formatNumber(low + 1, 3)} to ${formatNumber(high + 1, 3)} times`
      : [low, high].map((end) => formatPercent(end, Math.abs(end) < 0.1 ? 1 : 0)).join(" to ");
  return { text: verdict, tone: toneOf(verdict), interval: `KL ${interval}` };
}

const toneOf = (verdict: PairedChange["verdict"]) => (verdict === "worse" ? "bad" : verdict === "better" ? "good" : "");

function changeText(scale: "ratio" | "points", value: number, base: number): string {
  const sign = value > base ? "+" : "−";
  const difference = Math.abs(value - base);
  if (scale === "points") return `${sign}${(100 * difference).toFixed(2)} points`;
  const factor = value / base;
  if (factor > 0 && (factor >= MANY || factor <= 1 / MANY)) {
    return factor > 1 ? `${formatNumber(factor, 3)} times` : `${formatPercent(factor - 1, 0)}`;
  }
  return formatPercent(factor - 1, Math.abs(factor - 1) < 0.1 ? 2 : 0);
}
