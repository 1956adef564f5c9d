import { useMemo, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { ModelResult, ResultPage } from "../../api/types";
import type { Axis } from "../../charts/scale";
import { Scatter } from "../../charts/scatter";
import { formatBytes, formatNumber, formatPercent, shortId } from "../../format";
import { LABELS } from "../../labels";
import { Link } from "../../link";
import { modelText, recipeText } from "../../names";
import { Empty, Pending, Term, Time, Title } from "../../ui/basics";
import { Pages, Table } from "../../ui/table";
import { paretoFront } from "../compare/pareto";
import { VerdictLevel } from "../job-progress";
import { PublishedAt, publicationText } from "../run/publish";
import { endsOf } from "../run/verdict";
import { byVerdict, measured } from "./results";

const SIZES: Axis = { format: formatBytes, leastSpan: 0.2 };
const DIVERGENCES: Axis = { format: (value) => formatNumber(value, 3), fromZero: true };
const EVERY_MS = 10_000;

/** The results of one model over time, what the model came from, and what was made of its results. */
export function ModelLineage({ model, cursor }: { model: string; cursor?: string }) {
  const params = { model, cursor, limit: 100 };
  const query = useQuery(
    `results ${JSON.stringify(params)}`,
    (signal) => get<ResultPage>("/v1/models/results", params, signal),
    { everyMs: EVERY_MS },
  );
  const page = query.data;
  return (
    <>
      <Title>{modelText(model)}</Title>
      <p className="row">
        <code className="wrap">{model}</code>
        <Link to="/" search={{ model: [model] }}>
          All runs of this model
        </Link>
        <Link to="/models">All models</Link>
      </p>
      {page?.derived_from && (
        <p>
          This model is the result of run{" "}
          <Link to="/jobs/$id" params={{ id: page.derived_from.job_id }}>
            {shortId(page.derived_from.job_id)}
          </Link>
          , which quantized{" "}
          <Link to="/models" search={{ model: page.derived_from.model }}>
            {modelText(page.derived_from.model)}
          </Link>
          .
        </p>
      )}
      <Pending query={query} />
      {page?.data.length === 0 && (
        <Empty>
          <p>No run of this model has succeeded yet. Its results appear here, with their sizes and their quality.</p>
        </Empty>
      )}
      {page && page.data.length > 0 && (
        <>
          <SizeAndQuality results={page.data} />
          <ResultTable results={page.data} />
        </>
      )}
      <Pages
        back={
          cursor && (
            <Link to="/models" search={{ model }}>
              ← Newest
            </Link>
          )
        }
        next={
          page?.next_cursor && (
            <Link to="/models" search={{ model, cursor: page.next_cursor }}>
              Older →
            </Link>
          )
        }
      />
    </>
  );
}

function SizeAndQuality({ results }: { results: ModelResult[] }) {
  const [picked, setPicked] = useState<string | null>(null);
  const points = useMemo(() => measured(results), [results]);
  const series = useMemo(() => byVerdict(points), [points]);
  const fronts = useMemo(() => [paretoFront(points).map(({ bytes, loss }) => ({ x: bytes, y: loss }))], [points]);
  if (points.length < 2) return null;
  return (
    <section className="card">
      <h2>Size vs. quality</h2>
      <Scatter
        label="KL divergence and size of each result; lower is better for both"
        series={series}
        xLabel="size"
        yLabel="KL divergence"
        xAxis={SIZES}
        yAxis={DIVERGENCES}
        radius={5}
        fronts={fronts}
        onPick={setPicked}
        picked={picked}
      />
      <p className="sub">Bars are 95 % intervals. The dashed line joins the Pareto-optimal results.</p>
    </section>
  );
}

function ResultTable({ results }: { results: ModelResult[] }) {
  return (
    <Table
      caption="Below a divergence stands its 95 % interval."
      head={
        <>
          <th>Run</th>
          <th>Recipe</th>
          <th className="number">Size</th>
          <th>Verdict</th>
          <th className="number">
            <Term>{LABELS.klMean}</Term>
          </th>
          <th>Finished</th>
          <th>Published</th>
          <th>Quantized again</th>
        </>
      }
    >
      {results.map((result) => (
        <Row key={result.job_id} result={result} />
      ))}
    </Table>
  );
}

function Row({ result }: { result: ModelResult }) {
  const { job_id: id, size_before_bytes: before, size_after_bytes: after, publication } = result;
  const ends = endsOf({ value: result.kl_mean ?? null, stderr: result.kl_stderr ?? null });
  return (
    <tr>
      <td>
        <Link to="/jobs/$id" params={{ id: id }} title={id}>
          {result.name ?? shortId(id)}
        </Link>
        {result.cloned_from && (
          <div className="sub">
            clone of{" "}
            <Link to="/jobs/$id" params={{ id: result.cloned_from }}>
              {shortId(result.cloned_from)}
            </Link>
          </div>
        )}
      </td>
      <td>
        {recipeText(result.recipe)}
        <div className="sub">{result.export.join(", ")}</div>
      </td>
      <td className="number">
        {formatBytes(after)}
        {before != null && after != null && <div className="sub">{formatPercent(after / before - 1, 0)}</div>}
      </td>
      <td className="nowrap">{result.verdict ? <VerdictLevel level={result.verdict} /> : "not measured"}</td>
      <td className="number">
        {formatNumber(result.kl_mean, 3)}
        {ends && <div className="sub">{ends.join(" to ")}</div>}
      </td>
      <td className="nowrap">
        <Time at={result.finished_at} />
        {result.sha && <div className="sub">commit {result.sha.slice(0, 7)}</div>}
      </td>
      <td className="wrap wide">
        {publication && (publication.url ? <PublishedAt address={publication.url} /> : publicationText(publication))}
      </td>
      <td>
        {result.derived_models.map((model) => (
          <div key={model}>
            <Link to="/models" search={{ model }} title={model}>
              {modelText(model)}
            </Link>
          </div>
        ))}
      </td>
    </tr>
  );
}
