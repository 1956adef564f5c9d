// Series differ by colour and by shape, so that colour alone carries no information.

const SHAPES: ((x: number, y: number, r: number) => string)[] = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}l${1.2 * r} ${2.1 * r}h${-2.4 * r}z`,
  (x, y, r) => `M${x} ${y - 1.4 * r}l${1.4 * r} ${1.4 * r}l${-1.4 * r} ${1.4 * r}l${-1.4 * r} ${-1.4 * r}z`,
  (x, y, r) => `M${x} ${y + 1.2 * r}l${1.2 * r} ${-2.1 * r}h${-2.4 * r}z`,
  (x, y, r) => `M${x - 1.3 * r} ${y - 0.45 * r}h${2.6 * r}v${0.9 * r}h${-2.6 * r}z`,
  (x, y, r) => `M${x - 0.45 * r} ${y - 1.3 * r}h${0.9 * r}v${2.6 * r}h${-0.9 * r}z`,
  (x, y, r) => `M${x - 1.2 * r} ${y - r}l${2.4 * r} ${r}l${-2.4 * r} ${r}z`,
];

export const NUM_LOOKS = SHAPES.length;

/** One path for all marks of a series: much faster to render than thousands of elements. */
export function marksPath(points: { x: number; y: number }[], look: number, radius: number): string {
  const shape = SHAPES[look % NUM_LOOKS] as (x: number, y: number, r: number) => string;
  return points.map(({ x, y }) => shape(Number(x.toFixed(1)), Number(y.toFixed(1)), radius)).join("");
}

export const colourOf = (look: number) => `var(--series-${look % NUM_LOOKS})`;

export function Mark({ look }: { look: number }) {
  return (
    <svg viewBox="-7 -7 14 14" aria-hidden="true">
      <path d={marksPath([{ x: 0, y: 0 }], look, 4.5)} fill={colourOf(look)} />
    </svg>
  );
}
