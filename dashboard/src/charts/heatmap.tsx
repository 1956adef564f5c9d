import type { CSSProperties, PointerEvent } from "react";
import { scrollable } from "../ui/basics";
import type { HeatGrid } from "./heat-cells";

const LABELS_PX = 112;
const CELL_PX = 6;

/** Module types by blocks: a stronger colour is worse. A click selects the layer; the table of layers has the numbers. */
export function Heatmap({
  label,
  grid: { rows, blocks, best, worst },
  onPick,
  picked,
}: {
  label: string;
  grid: HeatGrid;
  onPick: (name: string) => void;
  picked: string | null;
}) {
  const pick = ({ target }: PointerEvent) => {
    const name = (target as HTMLElement).dataset.name;
    if (name) onPick(name);
  };
  return (
    <>
      <div className="table" ref={scrollable}>
        <table
          className="heatmap"
          role="img"
          aria-label={label}
          style={{ minWidth: LABELS_PX + CELL_PX * blocks.length }}
          onPointerDown={pick}
        >
          <tbody>
            {rows.map(({ kind, cells }) => (
              <tr key={kind}>
                <th style={{ width: LABELS_PX }} title={kind}>
                  {kind}
                </th>
                {cells.map((cell, index) => (
                  <td
                    key={blocks[index]}
                    data-name={cell?.name}
                    title={cell ? `${cell.name}: ${cell.text}` : undefined}
                    className={cell ? (cell.name === picked ? "picked" : undefined) : "none"}
                    style={{ "--share": `${Math.round(100 * (cell?.share ?? 0))}%` } as CSSProperties}
                  />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p className="sub">
        Blocks {blocks[0]} to {blocks.at(-1)} from left to right. A stronger colour is worse: from {best} to {worst} and
        beyond.
      </p>
    </>
  );
}
