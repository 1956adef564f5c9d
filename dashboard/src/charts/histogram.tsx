import { formatNumber, plural } from "../format";

const WIDTH = 420;
const HEIGHT = 110;
const ROOM = 18; // for the numbers below the bars

/** The heights of bars that grow with the logarithm of the counts, as shares: few weights far out must be seen. */
export function heightsOf(counts: number[]): number[] {
  const most = Math.log1p(Math.max(...counts, 0));
  return counts.map((count) => (most ? Math.log1p(count) / most : 0));
}

/** "12 (5.1 times the median), 40 (3.2 times)": input channels that are far larger than the others. */
export function outliersText(outliers: { channel: number; ratio: number }[]): string {
  if (!outliers.length) return "none above 3 times the median";
  return outliers
    .map(({ channel, ratio }, index) => `${channel} (${formatNumber(ratio, 2)} times${index ? "" : " the median"})`)
    .join(", ");
}

/** How many weights lie in each part of the range from -largest to largest. */
export function Histogram({ label, largest, counts }: { label: string; largest: number; counts: number[] }) {
  const width = WIDTH / counts.length;
  const bars = HEIGHT - ROOM;
  const total = counts.reduce((sum, count) => sum + count, 0);
  return (
    <figure className="histogram">
      <svg
        className="bars"
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        role="img"
        aria-label={`${label}: ${plural(total, "weight")} counted`}
      >
        {heightsOf(counts).map((height, index) => (
          <rect
            // biome-ignore lint/suspicious/noArrayIndexKey: a bar has its place alone
            key={index}
            x={index * width + 1}
            y={bars - height * bars}
            width={width - 2}
            height={height * bars}
          >
            <title>{`${partText(index, counts.length, largest)}: ${plural(counts[index] ?? 0, "weight")}`}</title>
          </rect>
        ))}
        {[-1, 0, 1].map((side) => (
          <text
            key={side}
            x={((side + 1) * WIDTH) / 2}
            y={HEIGHT - 4}
            textAnchor={side < 0 ? "start" : side ? "end" : "middle"}
          >
            {formatNumber(side * largest, 3)}
          </text>
        ))}
      </svg>
      <figcaption className="sub">Weights as they were rounded. Bars grow with the logarithm of the number.</figcaption>
    </figure>
  );
}

function partText(index: number, count: number, largest: number): string {
  const edge = (place: number) => formatNumber(((2 * place) / count - 1) * largest, 2);
  return `${edge(index)} to ${edge(index + 1)}`;
}
