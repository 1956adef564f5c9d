import { getRouteApi } from "@tanstack/react-router";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { RegisteredModel, RegisteredModelPage } from "../../api/types";
import { Link } from "../../link";
import { Empty, Pending, scrollable, Title } from "../../ui/basics";
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
      <Pending query={query} />
      {query.data?.data.length === 0 && (
        <Empty>No models yet. Open a run that has succeeded and choose “Add to registry”.</Empty>
      )}
      {query.data && query.data.data.length > 0 && (
        <>
          <RegistryTable models={query.data.data} />
          <DecidedRequests />
        </>
      )}
      <div className="row spread">
        {cursor ? <Link to="/registry">← First</Link> : <span />}
        {query.data?.next_cursor && (
          <Link to="/registry" search={{ cursor: query.data.next_cursor }}>
            More →
          </Link>
        )}
      </div>
    </>
  );
}

function RegistryTable({ models }: { models: RegisteredModel[] }) {
  return (
    <div className="table" ref={scrollable}>
      <table>
        <thead>
          <tr>
            <th>Model</th>
            <th>Aliases</th>
            <th className="number">Latest version</th>
            <th className="number">Versions</th>
            <th className="number">Pending requests</th>
          </tr>
        </thead>
        <tbody>
          {models.map((model) => (
            <tr key={model.name}>
              <td className="wide">
                <Link to="/registry" search={{ name: model.name }}>
                  {model.name}
                </Link>
              </td>
              <td>
                <Aliases model={model} />
              </td>
              <td className="number">{model.latest_version ?? "–"}</td>
              <td className="number">{model.num_versions}</td>
              <td className="number">{model.num_pending}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
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
