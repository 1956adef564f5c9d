import { useMemo, useState } from "react";
import type { Job, Layer, Report } from "../../api/types";
import { heatGrid } from "../../charts/heat-cells";
import { Heatmap } from "../../charts/heatmap";
import { Histogram, outliersText } from "../../charts/histogram";
import {
  byBadness,
  COUNTS,
  METRICS,
  type Metric,
  metricValue,
  mostTelling,
  outliers,
  rankText,
  seriesByKind,
} from "../../charts/layers";
import { Scatter } from "../../charts/scatter";
import { formatBytes, formatNumber, plural } from "../../format";
import { Empty, Facts, Term } from "../../ui/basics";
import { FINAL_STATES } from "../../ui/states";
import { Table } from "../../ui/table";
import { NextStep } from "./verdict-notice";

const ROWS = 50;
const MOST_OUTLIERS = 4;

/** The quantization error of each layer: a chart by module type, the selected layer, and a table of all layers. */
export function LayersCard({ job, layers, report }: { job: Job; layers: Layer[]; report: Report | undefined }) {
  const measured = METRICS.filter((metric) => layers.some((layer) => metricValue(layer, metric) !== null));
  const [metricId, setMetricId] = useState<Metric["id"] | null>(null);
  const [picked, setPicked] = useState<string | null>(null);
  const metric = METRICS.find((each) => each.id === metricId) ?? mostTelling(layers);
  const series = useMemo(() => seriesByKind(layers, metric), [layers, metric]);
  const [view, setView] = useState("points");
  const grid = useMemo(() => (view === "heatmap" ? heatGrid(layers, metric) : null), [layers, metric, view]);
  const layer = layers.find((each) => each.name === picked);
  const numBlocks = FINAL_STATES.has(job.state) ? 0 : numBlocksOf(job);
  const blocks = useMemo(
    () => (numBlocks ? { ...COUNTS, span: [0, numBlocks - 1] as [number, number] } : COUNTS),
    [numBlocks],
  );
  return (
    <section className="card">
      <div className="row spread">
        <h2>Quantization error by layer</h2>
        {measured.length > 0 && (
          <div className="row">
            <select aria-label="View" value={view} onChange={(event) => setView(event.target.value)}>
              <option value="points">Points by block</option>
              <option value="heatmap">Heatmap: block by module</option>
            </select>
            <select
              aria-label="Metric"
              value={metric.id}
              onChange={(event) => setMetricId(event.target.value as Metric["id"])}
            >
              {measured.map((each) => (
                <option key={each.id} value={each.id}>
                  {each.text}
                </option>
              ))}
            </select>
          </div>
        )}
      </div>
      {layers.length === 0 ? (
        <Empty>
          {!FINAL_STATES.has(job.state) ? "Layers appear here as they are quantized." : "No layer metrics."}
        </Empty>
      ) : (
        <>
          {grid ? (
            <Heatmap
              label={`${metric.text} of ${plural(layers.length, "layer")} by module type and block`}
              grid={grid}
              onPick={setPicked}
              picked={picked}
            />
          ) : (
            <Scatter
              label={`${metric.text} of ${plural(layers.length, "layer")} by block`}
              series={series}
              xLabel="block"
              yLabel={metric.text}
              xAxis={blocks}
              yAxis={metric.axis}
              onPick={setPicked}
              picked={picked}
            />
          )}
          <Outliers layers={layers} metric={metric} onPick={setPicked} />
          {layer && <LayerFacts layer={layer} layers={layers} report={report} />}
          <LayerTable layers={layers} metric={metric} />
        </>
      )}
      {report?.more_bits && <NextStep job={job} step={report.more_bits} search={{ more_bits: "1" }} />}
    </section>
  );
}

/** The number of blocks of the model, as the phases that go through them tell; 0 before. */
function numBlocksOf({ phases, progress }: Job): number {
  const counted = [...phases.map(({ unit, total }) => ({ unit, total })), ...(progress ? [progress] : [])];
  return Math.max(0, ...counted.map(({ unit, total }) => (unit === "block" ? (total ?? 0) : 0)));
}

/** Names the layers that are far worse than the others. */
function Outliers({ layers, metric, onPick }: { layers: Layer[]; metric: Metric; onPick: (name: string) => void }) {
  const far = useMemo(() => outliers(layers, metric), [layers, metric]);
  if (!far.length) return null;
  return (
    <div className="row outliers">
      <strong>Outliers:</strong>
      {far.slice(0, MOST_OUTLIERS).map((layer) => (
        <button type="button" key={layer.name} className="link wrap" onClick={() => onPick(layer.name)}>
          {layer.name} ({metric.format(metricValue(layer, metric) ?? 0)})
        </button>
      ))}
      {far.length > MOST_OUTLIERS && <span className="faint">and {far.length - MOST_OUTLIERS} more</span>}
    </div>
  );
}

function LayerFacts({ layer, layers, report }: { layer: Layer; layers: Layer[]; report: Report | undefined }) {
  const { bytes, num_weights: count } = report?.layers.find(({ name }) => name === layer.name) ?? {};
  const { weight_spread: spread, input_range: range } = layer;
  return (
    <section className="notice" aria-label="Selected layer">
      <Facts
        facts={[
          ["Layer", <code key="name">{layer.name}</code>],
          ["Block", layer.block],
          ["Scheme", layer.scheme],
          ["Rank", rankText(layer, layers)],
          ...(bytes && count
            ? [
                ["Size", `${formatBytes(bytes)}, ${formatNumber((8 * bytes) / count, 3)} bits per weight`] as [
                  string,
                  string,
                ],
              ]
            : []),
          ...METRICS.map((metric): [string, string] => {
            const value = metricValue(layer, metric);
            return [metric.text, value === null ? "not measured" : metric.format(value)];
          }),
          ...(range
            ? [
                [
                  "Largest input",
                  `${formatNumber(range.largest, 3)}; ${formatNumber(range.median, 3)} in the median channel`,
                ] as [string, string],
                ["Outlier channels of the input", outliersText(range.outliers)] as [string, string],
              ]
            : []),
          ...(spread ? [["Outlier channels of the weight", outliersText(spread.outliers)] as [string, string]] : []),
        ]}
      />
      {spread && <Histogram label={`Weights of ${layer.name}`} largest={spread.largest} counts={spread.counts} />}
    </section>
  );
}

/** The values of the chart as a table, worst first. Paginated: there may be thousands of layers. */
function LayerTable({ layers, metric }: { layers: Layer[]; metric: Metric }) {
  const [isOpen, setIsOpen] = useState(false);
  const [page, setPage] = useState(0);
  const sorted = useMemo(() => (isOpen ? byBadness(layers, metric) : []), [layers, metric, isOpen]);
  const numPages = Math.ceil(layers.length / ROWS);
  return (
    <details open={isOpen} onToggle={(event) => setIsOpen(event.currentTarget.open)}>
      <summary>Show as table</summary>
      {isOpen && (
        <>
          <Table
            caption="Sorted by error, worst first"
            head={
              <>
                <th>Layer</th>
                <th className="number">Block</th>
                <th>Scheme</th>
                {METRICS.map((each) => (
                  <th key={each.id} className="number">
                    <Term>{each.text}</Term>
                  </th>
                ))}
              </>
            }
          >
            {sorted.slice(page * ROWS, (page + 1) * ROWS).map((layer) => (
              <tr key={layer.name}>
                <td>
                  <code>{layer.name}</code>
                </td>
                <td className="number">{layer.block}</td>
                <td>{layer.scheme}</td>
                {METRICS.map((each) => {
                  const value = metricValue(layer, each);
                  return (
                    <td key={each.id} className="number">
                      {value === null ? "–" : each.format(value)}
                    </td>
                  );
                })}
              </tr>
            ))}
          </Table>
          {numPages > 1 && (
            <div className="row">
              <button
                type="button"
                className="small"
                disabled={page === 0}
                aria-label="Previous page"
                onClick={() => setPage(page - 1)}
              >
                ←
              </button>
              <span>
                {page + 1} of {numPages}
              </span>
              <button
                type="button"
                className="small"
                disabled={page >= numPages - 1}
                aria-label="Next page"
                onClick={() => setPage(page + 1)}
              >
                →
              </button>
            </div>
          )}
        </>
      )}
    </details>
  );
}
