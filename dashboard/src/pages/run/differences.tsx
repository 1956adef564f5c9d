import type { Quality, Report } from "../../api/types";
import { formatNumber, formatShare } from "../../format";
import { LABELS } from "../../labels";
import { scrollable } from "../../ui/basics";
import { measuredText } from "./verdict";

type Ranges = NonNullable<Quality["by_position"]>;

/** How far the predictions are from the original's at the beginning of a window, and further on. */
export function ByPosition({ ranges }: { ranges: Ranges }) {
  if (ranges.length === 0) return null;
  return (
    <div className="table" ref={scrollable}>
      <table>
        <caption>
          By position in a window. If the error grows with the context, the values rise from row to row.
        </caption>
        <thead>
          <tr>
            <th>Positions</th>
            <th className="number">Tokens</th>
            <th className="number">{LABELS.klMean}</th>
            <th className="number">Top-1 agreement</th>
          </tr>
        </thead>
        <tbody>
          {ranges.map((range) => (
            <tr key={range.first}>
              <td className="nowrap">
                {formatNumber(range.first)} to {formatNumber(range.last)}
              </td>
              <td className="number">{formatNumber(range.num_tokens)}</td>
              <td className="number nowrap">{measuredText(range.kl_mean, 3)}</td>
              <td className="number nowrap">{measuredText(range.top1_agreement, 4)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The share of values that static ranges of activations clip, by kind of tensor, the largest first. */
export function Clipping({ shares }: { shares: NonNullable<Report["clipping"]> }) {
  return (
    <>
      <h3>Clipping by kind of layer</h3>
      <div className="table" ref={scrollable}>
        <table>
          <caption>Values on held-out text outside the static activation ranges, for all blocks.</caption>
          <thead>
            <tr>
              <th>Tensor</th>
              <th className="number">Clipped</th>
            </tr>
          </thead>
          <tbody>
            {Object.entries(shares)
              .sort(([, one], [, other]) => other - one)
              .map(([kind, share]) => (
                <tr key={kind}>
                  <td>
                    <code>{kind}</code>
                  </td>
                  <td className="number">{formatShare(share)}</td>
                </tr>
              ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
