import { getRouteApi } from "@tanstack/react-router";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { ModelPage, ResultBrief, UsedModel } from "../../api/types";
import { formatBytes } from "../../format";
import { Link } from "../../link";
import { modelText, recipeText } from "../../names";
import { Time, Title } from "../../ui/basics";
import { Listing, Pages } from "../../ui/table";
import { FirstJob } from "../first-job";
import { VerdictLevel } from "../job-progress";
import { ModelLineage } from "./lineage";

const EVERY_MS = 10_000;

const route = getRouteApi("/models");

/** The models that jobs used; with the parameter `model`, the results of one of them. */
export default function Models() {
  const { model, cursor } = route.useSearch();
  return model ? <ModelLineage key={model} model={model} cursor={cursor} /> : <ModelList cursor={cursor} />;
}

function ModelList({ cursor }: { cursor?: string }) {
  const params = { cursor, limit: 50 };
  const query = useQuery(`models ${JSON.stringify(params)}`, (signal) => get<ModelPage>("/v1/models", params, signal), {
    everyMs: EVERY_MS,
  });
  return (
    <>
      <Title>Models</Title>
      <Listing
        query={query}
        empty={
          <FirstJob>
            No models yet. A model appears here with its first job, and its results are compared over time.
          </FirstJob>
        }
        head={
          <>
            <th>Model</th>
            <th className="number">Runs</th>
            <th className="number">Results</th>
            <th>Best result</th>
            <th>Newest result</th>
            <th>Last activity</th>
          </>
        }
        row={(model) => <ModelRow key={model.name} model={model} />}
      />
      <Pages
        back={cursor && <Link to="/models">← Newest</Link>}
        next={
          query.data?.next_cursor && (
            <Link to="/models" search={{ cursor: query.data.next_cursor }}>
              Older →
            </Link>
          )
        }
      />
    </>
  );
}

function ModelRow({ model }: { model: UsedModel }) {
  return (
    <tr>
      <td className="wide">
        <Link to="/models" search={{ model: model.name }}>
          {modelText(model.name)}
        </Link>
        <div className="sub wrap">{model.name}</div>
        {model.derived_from && (
          <div className="sub">
            from{" "}
            <Link to="/models" search={{ model: model.derived_from.model }}>
              {modelText(model.derived_from.model)}
            </Link>
          </div>
        )}
      </td>
      <td className="number">{model.num_jobs}</td>
      <td className="number">{model.num_results}</td>
      <td>
        <Brief result={model.best} />
      </td>
      <td>
        <Brief result={model.newest} />
      </td>
      <td className="nowrap">
        <Time at={model.active_at} />
      </td>
    </tr>
  );
}

function Brief({ result }: { result: ResultBrief | null }) {
  if (!result) return <>–</>;
  return (
    <>
      <Link to="/jobs/$id" params={{ id: result.job_id }}>
        {recipeText(result.recipe)}
      </Link>
      <div className="sub">
        {formatBytes(result.size_after_bytes)} {result.verdict && <VerdictLevel level={result.verdict} />}
      </div>
    </>
  );
}
