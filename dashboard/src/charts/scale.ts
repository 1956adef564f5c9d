// Maps values to positions in a chart, and chooses round numbers for its axes.

export interface Scale {
  (value: number): number;
  ticks: number[];
}

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

/** A linear scale with some room at both ends, so that no mark lies on the frame. Ticks come from `niceTicks`. */
export function linear(
  values: number[],
  from: number,
  to: number,
  { room = 0.05, count = 5, minStep = 0 } = {},
): Scale {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * room;
  [low, high] = [low - margin, high + margin];
  const scale = (value: number) => from + ((value - low) / (high - low)) * (to - from);
  return Object.assign(scale, { ticks: niceTicks(low, high, count, minStep) });
}
