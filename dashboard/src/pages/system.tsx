import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { JobSummary, ProjectUsage } from "../api/types";
import { formatBytes } from "../format";
import { LABELS } from "../labels";
import { useSession } from "../sign-in";
import { Code, Facts, Failure, Loading, Pending, scrollable, Time, Title } from "../ui/basics";
import { STATE_ORDER, STATES } from "../ui/states";

interface Health {
  status: string;
  database: string;
  broker: string;
}

const health = (value: string) => (
  <span className={`state ${value === "ok" ? "good" : value === "degraded" ? "warn" : "bad"}`}>
    {value === "ok" ? "✓" : "✕"} {value}
  </span>
);

export default function System() {
  const { key } = useSession();
  const ready = useQuery("ready", (signal) => get<Health>("/healthz/ready", {}, signal), { everyMs: 5000 });
  const summary = useQuery("summary", (signal) => get<JobSummary>("/v1/jobs/summary", {}, signal), { everyMs: 5000 });
  return (
    <>
      <Title>System</Title>
      <section className="card">
        <h2>Health</h2>
        {ready.error && <Failure error={ready.error} retry={ready.reload} />}
        {!ready.data && !ready.error && <Loading />}
        {ready.data && (
          <Facts
            facts={[
              ["Service", health(ready.data.status)],
              ["Database", health(ready.data.database)],
              ["Broker", health(ready.data.broker)],
            ]}
          />
        )}
      </section>
      <section className="card">
        <h2>Runs by state</h2>
        {summary.data && (
          <Facts facts={STATE_ORDER.map((state) => [STATES[state].text, summary.data?.by_state[state] ?? 0])} />
        )}
      </section>
      <Quotas />
      <section className="card">
        <h2>Signed in as</h2>
        <Facts
          facts={[
            ["Key", key.name],
            [LABELS.permissions, key.scopes.join(", ")],
            ["Project", <code key="project">{key.project_id}</code>],
            ["Expires", key.expires_at ? <Time key="until" at={key.expires_at} /> : "never"],
          ]}
        />
      </section>
      <section className="card">
        <h2>API</h2>
        <p>
          Everything in this dashboard comes from the API. The <a href="/openapi.json">OpenAPI document</a> describes
          every endpoint.
        </p>
        <Code
          text={`curl -sS ${window.location.origin}/v1/jobs -H "Authorization: Bearer $BITFOUNDRY_API_KEY"`}
          label="Example request with curl"
        />
      </section>
    </>
  );
}

function Quotas() {
  const query = useQuery("usage", (signal) => get<ProjectUsage>("/v1/usage", {}, signal), { everyMs: 10_000 });
  const show = (value: number, unit: string) => (unit === "bytes" ? formatBytes(value) : value.toLocaleString());
  return (
    <section className="card">
      <h2>Project quotas</h2>
      <Pending query={query} />
      {query.data && (
        <div className="table" ref={scrollable}>
          <table>
            <thead>
              <tr>
                <th>Quota</th>
                <th>Used</th>
                <th>Limit</th>
              </tr>
            </thead>
            <tbody>
              {query.data.quotas.map(({ quota, unit, used, limit }) => (
                <tr key={quota}>
                  <td>
                    <code>{quota}</code>
                  </td>
                  <td>
                    {show(used, unit)} {unit !== "bytes" && unit}{" "}
                    {limit !== null && used >= limit && <span className="state warn">⚠ limit reached</span>}
                  </td>
                  <td>{limit === null ? "unlimited" : show(limit, unit)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
