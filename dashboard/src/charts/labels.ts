// Where the names of points stand in a chart, without covering each other.

export interface Label {
  x: number;
  y: number;
  text: string;
  anchor: "start" | "end";
}

const CHARACTER = 6.2; // the width of one at the size of a chart's text, on average
const LINE = 13;
const GAP = 9; // from the middle of the mark
const MAX_CHARACTERS = 28;

interface Box {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

/**
 * A label between `from` and `to`, and above `floor`, for each point that has room for one, the first points first.
 * Below and to the left of a Pareto-optimal point are no others: that place is tried first.
 */
export function placeLabels(
  points: { x: number; y: number; text: string }[],
  from: number,
  to: number,
  floor: number,
): Label[] {
  const taken: Box[] = [];
  return points.flatMap(({ x, y, text: full }) => {
    const text = full.length > MAX_CHARACTERS ? `${full.slice(0, MAX_CHARACTERS - 1)}…` : full;
    const length = CHARACTER * text.length;
    for (const baseline of [y + GAP + LINE / 2, y + 4, y - GAP]) {
      for (const anchor of ["end", "start"] as const) {
        const start = anchor === "start" ? x + GAP : x - GAP;
        const left = anchor === "start" ? start : start - length;
        const box = { left, right: left + length, top: baseline - LINE, bottom: baseline };
        const isOutside = left < from || box.right > to || box.top < 0 || baseline > floor;
        if (isOutside || taken.some((other) => overlap(box, other))) continue;
        taken.push(box);
        return [{ x: start, y: baseline, text, anchor }];
      }
    }
    return [];
  });
}

const overlap = (a: Box, b: Box) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
