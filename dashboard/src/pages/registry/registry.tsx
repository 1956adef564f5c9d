import { getRouteApi } from "@tanstack/react-router";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { RegisteredModel, RegisteredModelPage } from "../../api/types";
import { Link } from "../../link";
import { Empty, Title } from "../../ui/basics";
import { Listing, Pages } from "../../ui/table";
import { VerdictLevel } from "../job-progress";
import { ModelVersions } from "./model";
import { DecidedRequests, Requests, useRequests } from "./requests";

const EVERY_MS = 10_000;

const route = getRouteApi("/registry");

/** The models of the registry; with the parameter `name`, the versions of one of them. */
export default function Registry() {
  const { name, cursor } = route.useSearch();
  return name ? <ModelVersions key={name} name={name} cursor={cursor} /> : <RegistryList cursor={cursor} />;
}

function RegistryList({ cursor }: { cursor?: string }) {
  const params = { cursor, limit: 50 };
  const query = useQuery(
    `registry ${JSON.stringify(params)}`,
    (signal) => get<RegisteredModelPage>("/v1/registry/models", params, signal),
    { everyMs: EVERY_MS },
  );
  const requests = useRequests();
  return (
    <>
      <Title>Registry</Title>
      <Requests query={requests} onMoved={query.reload} />
      <Listing
        query={query}
        empty={<Empty>No models yet. Open a run that has succeeded and choose “Add to registry”.</Empty>}
        head={
          <>
            <th>Model</th>
            <th>Aliases</th>
            <th className="number">Latest version</th>
            <th>Its verdict</th>
            <th className="number">Versions</th>
            <th className="number">Pending requests</th>
          </>
        }
        row={(model) => <ModelRow key={model.name} model={model} />}
      />
      {query.data && query.data.data.length > 0 && <DecidedRequests />}
      <Pages
        back={cursor && <Link to="/registry">← First</Link>}
        next={
          query.data?.next_cursor && (
            <Link to="/registry" search={{ cursor: query.data.next_cursor }}>
              More →
            </Link>
          )
        }
      />
    </>
  );
}

function ModelRow({ model }: { model: RegisteredModel }) {
  return (
    <tr>
      <td className="wide">
        <Link to="/registry" search={{ name: model.name }}>
          {model.name}
        </Link>
      </td>
      <td>
        <Aliases model={model} />
      </td>
      <td className="number">{model.latest_version ?? "–"}</td>
      <td>{model.latest_verdict ? <VerdictLevel level={model.latest_verdict} /> : "–"}</td>
      <td className="number">{model.num_versions}</td>
      <td className="number">{model.num_pending}</td>
    </tr>
  );
}

function Aliases({ model }: { model: RegisteredModel }) {
  if (!model.aliases.length) return <>–</>;
  return (
    <>
      {model.aliases.map(({ alias, version, protected: isProtected }) => (
        <div key={alias} className="nowrap">
          {alias}: {version} {isProtected && <span className="faint">protected</span>}
        </div>
      ))}
    </>
  );
}
