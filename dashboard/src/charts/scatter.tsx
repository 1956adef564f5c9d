import { type KeyboardEvent, memo, type PointerEvent, useLayoutEffect, useMemo, useRef, useState } from "react";
import { placeLabels } from "./labels";
import { colourOf, Mark, marksPath } from "./marks";
import { type Axis, linear } from "./scale";

export interface Point {
  x: number;
  y: number;
  /** The name of a layer or a run. */
  name: string;
  /** Half the length of its error bar. */
  error?: number;
}

export interface Series {
  name: string;
  look: number;
  points: Point[];
}

interface Props {
  label: string;
  series: Series[];
  xLabel: string;
  yLabel: string;
  /** Pass constants as axes: the chart is drawn again for every new object. */
  xAxis: Axis;
  yAxis: Axis;
  /** A value of y with a name, drawn as a line across the chart. */
  limit?: { y: number; text: string };
  joined?: boolean;
  radius?: number;
  /** The Pareto fronts, drawn as lines below the marks. */
  fronts?: { x: number; y: number }[][];
  /** The names of points that are written beside them, as is that of the point below the pointer. */
  labelled?: ReadonlySet<string>;
  onPick: (name: string) => void;
  picked: string | null;
}

const NO_FRONTS: { x: number; y: number }[][] = [];
const START_WIDTH = 900;
const HEIGHT = 300;
const FRAME = { left: 72, right: 14, top: 12, bottom: 40 };
const PICK_RADIUS = 30;

/** A scatter chart. A click selects the nearest point; the arrow keys move between points from left to right. */
export function Scatter(props: Props) {
  const { series, onPick, picked, xAxis, yAxis, limit, labelled, fronts = NO_FRONTS } = props;
  const [hovered, setHovered] = useState<string | null>(null);
  const [hidden, setHidden] = useState<ReadonlySet<string>>(new Set());
  const [width, setWidth] = useState(START_WIDTH);
  const frame = useRef<SVGSVGElement>(null);
  // drawn at the available width, so that the text keeps its size
  useLayoutEffect(() => {
    if (!frame.current) return;
    const observer = new ResizeObserver(
      ([entry]) => entry && setWidth(Math.max(240, Math.round(entry.contentRect.width))),
    );
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  const shown = useMemo(() => series.filter((each) => !hidden.has(each.name)), [series, hidden]);
  const placed = useMemo(
    () => place(shown, fronts, width, xAxis, yAxis, limit?.y),
    [shown, fronts, width, xAxis, yAxis, limit?.y],
  );
  const current = placed.all.find((each) => each.point.name === picked);

  const nearest = (event: PointerEvent<SVGSVGElement>) => {
    const box = frame.current?.getBoundingClientRect();
    if (!box) return undefined;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best: Placed | undefined;
    let bestDistance = PICK_RADIUS ** 2;
    for (const each of placed.all) {
      const distance = (each.x - x) ** 2 + (each.y - y) ** 2;
      if (distance < bestDistance) [best, bestDistance] = [each, distance];
    }
    return best?.point.name;
  };
  const pickNear = (event: PointerEvent<SVGSVGElement>) => {
    const name = nearest(event);
    if (name) onPick(name);
  };
  const step = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const index = placed.all.findIndex((each) => each.point.name === picked);
    const next = placed.all[Math.max(0, Math.min(placed.all.length - 1, index + by))];
    if (next) onPick(next.point.name);
  };
  const toggle = (name: string) =>
    setHidden((old) => {
      const next = new Set(old);
      if (!next.delete(name)) next.add(name);
      return next;
    });

  return (
    <div className="chart">
      {series.length > 1 && (
        <div className="legend">
          {series.map((each) => (
            <button
              type="button"
              key={each.name}
              className="chip"
              aria-pressed={!hidden.has(each.name)}
              onClick={() => toggle(each.name)}
            >
              <Mark look={each.look} /> {each.name}
            </button>
          ))}
        </div>
      )}
      {/* biome-ignore lint/a11y/useSemanticElements: a fieldset groups form controls, not the points of a chart */}
      <div
        role="group"
        // biome-ignore lint/a11y/noNoninteractiveTabindex: the arrow keys move among its points
        tabIndex={0}
        aria-label={`${props.label}. Use the left and right arrow keys to move between points.`}
        onKeyDown={step}
      >
        <svg
          ref={frame}
          height={HEIGHT}
          role="img"
          aria-label={props.label}
          onPointerDown={pickNear}
          onPointerMove={labelled && ((event) => setHovered(nearest(event) ?? null))}
          onPointerLeave={() => setHovered(null)}
        >
          <Axes placed={placed} xLabel={props.xLabel} yLabel={props.yLabel} />
          {placed.limitY !== undefined && <Limit y={placed.limitY} width={width} text={limit?.text ?? ""} />}
          <Marks placed={placed} joined={props.joined ?? false} radius={props.radius ?? 3.5} labelled={labelled} />
          {labelled && <Names placed={placed} labelled={labelled} first={[picked, hovered]} />}
          {current && <circle className="mark" cx={current.x} cy={current.y} r={8} />}
        </svg>
      </div>
      <p role="status" className="sub">
        {current
          ? `${current.point.name}: ${props.xLabel} ${xAxis.format(current.point.x)}, ${props.yLabel} ${yAxis.format(current.point.y)}${current.point.error ? ` ± ${(yAxis.formatError ?? yAxis.format)(current.point.error)}` : ""}`
          : "Click a point or use the arrow keys to see its values."}
      </p>
    </div>
  );
}

interface Placed {
  x: number;
  y: number;
  point: Point;
}

function place(
  series: Series[],
  fronts: { x: number; y: number }[][],
  width: number,
  xAxis: Axis,
  yAxis: Axis,
  limit: number | undefined,
) {
  const points = series.flatMap((each) => each.points);
  const xs = linear(
    points.map((point) => point.x),
    FRAME.left,
    width - FRAME.right,
    { ...xAxis, numTicks: width / 110 },
  );
  const ends = points.flatMap(({ y, error = 0 }) => [y - error, y + error]);
  const ys = linear(limit === undefined ? ends : [...ends, limit], HEIGHT - FRAME.bottom, FRAME.top, yAxis);
  const put = (point: Point): Placed => ({ x: xs(point.x), y: ys(point.y), point });
  const drawn = series.map((each) => ({ ...each, placed: each.points.map(put) }));
  const all = drawn.flatMap((each) => each.placed).sort((a, b) => a.x - b.x || a.y - b.y);
  const limitY = limit === undefined ? undefined : ys(limit);
  const lines = fronts.map((front) => front.map(({ x, y }) => ({ x: xs(x), y: ys(y) })));
  return { xs, ys, drawn, all, width, limitY, lines };
}

type Drawing = ReturnType<typeof place>;

const Axes = memo(function Axes({
  placed: { xs, ys, width },
  xLabel,
  yLabel,
}: { placed: Drawing } & Pick<Props, "xLabel" | "yLabel">) {
  const floor = HEIGHT - FRAME.bottom;
  return (
    <g>
      {ys.ticks.map(({ value, text }) => (
        <g key={value}>
          <line className="grid" x1={FRAME.left} x2={width - FRAME.right} y1={ys(value)} y2={ys(value)} />
          <text x={FRAME.left - 7} y={ys(value) + 4} textAnchor="end">
            {text}
          </text>
        </g>
      ))}
      {xs.ticks.map(({ value, text }) => (
        <text key={value} x={xs(value)} y={floor + 16} textAnchor="middle">
          {text}
        </text>
      ))}
      <line className="axis" x1={FRAME.left} x2={width - FRAME.right} y1={floor} y2={floor} />
      <text x={(FRAME.left + width) / 2} y={HEIGHT - 5} textAnchor="middle">
        {xLabel}
      </text>
      <text transform={`translate(12 ${HEIGHT / 2 - 10}) rotate(-90)`} textAnchor="middle">
        {yLabel}
      </text>
    </g>
  );
});

function Limit({ y, width, text }: { y: number; width: number; text: string }) {
  return (
    <g>
      <line className="limit" x1={FRAME.left} x2={width - FRAME.right} y1={y} y2={y} />
      <text x={width - FRAME.right} y={y - 4} textAnchor="end">
        {text}
      </text>
    </g>
  );
}

/** The names of points beside them: those of `first`, then those of `labelled` that find room. */
function Names({
  placed,
  labelled,
  first,
}: {
  placed: Drawing;
  labelled: ReadonlySet<string>;
  first: (string | null)[];
}) {
  const points = [
    ...first.flatMap((name) => placed.all.find(({ point }) => point.name === name) ?? []),
    ...placed.all.filter(({ point: { name } }) => labelled.has(name) && !first.includes(name)),
  ].map(({ x, y, point }) => ({ x, y, text: point.name }));
  return placeLabels(points, FRAME.left, placed.width, HEIGHT - FRAME.bottom).map(({ x, y, text, anchor }) => (
    <text key={`${x} ${y}`} className="label" x={x} y={y} textAnchor={anchor}>
      {text}
    </text>
  ));
}

const Marks = memo(function Marks({
  placed,
  joined,
  radius,
  labelled,
}: { placed: Drawing; joined: boolean; radius: number } & Pick<Props, "labelled">) {
  const bars = placed.all.filter(({ point }) => point.error);
  const isStrong = ({ point }: Placed) => !labelled || labelled.has(point.name);
  const [strong, faint] = [bars.filter(isStrong), bars.filter((bar) => !isStrong(bar))];
  return (
    <g>
      {placed.lines
        .filter((line) => line.length > 1)
        .map((line) => (
          <polyline
            key={`${line[0]?.x} ${line[0]?.y}`}
            points={line.map(({ x, y }) => `${x},${y}`).join(" ")}
            fill="none"
            stroke="var(--line-strong)"
            strokeDasharray="4 4"
          />
        ))}
      {strong.length > 0 && <path d={barsPath(strong, placed.ys)} stroke="var(--text)" />}
      {faint.length > 0 && <path d={barsPath(faint, placed.ys)} stroke="var(--text)" strokeOpacity={0.25} />}
      {placed.drawn.map((each) => (
        <g key={each.name}>
          {joined && (
            <polyline
              points={each.placed.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ")}
              fill="none"
              stroke={colourOf(each.look)}
              strokeOpacity={0.45}
            />
          )}
          <path d={marksPath(each.placed, each.look, radius)} fill={colourOf(each.look)} />
        </g>
      ))}
    </g>
  );
});

const barsPath = (bars: Placed[], ys: (value: number) => number) =>
  bars
    .map(({ x, point: { y, error = 0 } }) => {
      const [low, high] = [ys(y - error).toFixed(1), ys(y + error).toFixed(1)];
      return `M${x} ${low}V${high}m-4 0h8M${x - 4} ${low}h8`;
    })
    .join("");
