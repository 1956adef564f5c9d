// Maps values to positions in a chart, and chooses round numbers for its axes.

export interface Tick {
  value: number;
  text: string;
}

export interface Scale {
  (value: number): number;
  ticks: Tick[];
}

/** How an axis is drawn. */
export interface Axis {
  format: (value: number) => string;
  /** How half an error bar is written, if not as a value. */
  formatError?: (value: number) => string;
  /** Whether the axis begins at zero, so that lengths can be compared. */
  fromZero?: boolean;
  /** The least span as a share of the largest value: smaller differences must not look like cliffs. */
  leastSpan?: number;
  /** Whether the values are counts, such as blocks or layers. */
  counted?: boolean;
  /** Values that the axis shows in any case, so that it stays as it is while values arrive. */
  span?: [number, number];
  /** About so many ticks. */
  numTicks?: number;
}

const ROOM = 0.05; // beside the outermost marks, as a share of the span

/** About `count` round numbers that cover `low` to `high`, at least `minStep` apart. */
export function niceTicks(low: number, high: number, count = 5, minStep = 0): number[] {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const nice = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * (1 - 1e-9)) ?? 10 * power;
  const step = Math.max(nice, minStep);
  const ticks: number[] = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

/** Ticks of which no two have the same text: there are fewer of them where the format rounds. */
export function distinctTicks(low: number, high: number, { format, numTicks = 5, counted = false }: Axis): Tick[] {
  for (let count = numTicks; ; count /= 2) {
    const ticks = niceTicks(low, high, count, counted ? 1 : 0).map((value) => ({ value, text: format(value) }));
    if (new Set(ticks.map(({ text }) => text)).size === ticks.length) return withoutZeros(ticks);
  }
}

/** The ticks without decimals if all of theirs are zeros: 50 % beside 150 %, not 50.00 %. */
function withoutZeros(ticks: Tick[]): Tick[] {
  const bare = ticks.map(({ value, text }) => ({ value, text: text.replace(/[.,]0{1,2}(?=\D*$)/, "") }));
  return bare.some(({ text }) => /[.,]\d{1,2}\D*$/.test(text)) ? ticks : bare;
}

/** The range of an axis that shows `values`. */
export function rangeOf(values: number[], { fromZero = false, leastSpan = 0 }: Omit<Axis, "format">): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * ROOM;
  const missing = Math.max(0, leastSpan * Math.max(Math.abs(low), Math.abs(high)) - (high - low)) / 2;
  if (fromZero && low >= 0) return [0, high + margin || 1];
  return [low - margin - missing, high + margin + missing];
}

/** A linear scale with some room at both ends, so that no mark lies on the frame. */
export function linear(values: number[], from: number, to: number, axis: Axis): Scale {
  const [low, high] = rangeOf(axis.span ? [...values, ...axis.span] : values, axis);
  const scale = (value: number) => from + ((value - low) / (high - low)) * (to - from);
  return Object.assign(scale, { ticks: distinctTicks(low, high, axis) });
}
