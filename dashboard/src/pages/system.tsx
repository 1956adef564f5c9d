import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { JobSummary, List, Worker } from "../api/types";
import { useSession } from "../sign-in";
import { Code, type Fact, Facts, Failure, Loading, Title } from "../ui/basics";
import { STATE_ORDER, STATES } from "../ui/states";

interface Health {
  status: string;
  database: string;
  broker: string;
  sandbox: string;
  memory_limits: string[];
}

const LIMITS: Record<string, string> = {
  cgroup: "✓ by the kernel (cgroup)",
  watched: "✓ watched by the worker",
  unknown: "? by a worker of an older version",
};

/** The kernel's protection of processes that read models. */
function sandbox(value: string) {
  const isHeld = value.startsWith("landlock");
  return (
    <span className={`state ${isHeld ? "good" : "warn"}`}>
      {isHeld ? `✓ Landlock, version ${value.split(" ")[1]}` : `✕ ${value}`}
    </span>
  );
}

const health = (value: string) => (
  <span className={`state ${value === "ok" ? "good" : value === "degraded" ? "warn" : "bad"}`}>
    {value === "ok" ? "✓" : "✕"} {value}
  </span>
);

/** How many of the live workers take jobs, and why others do not: without one, nothing runs though all parts are well. */
function workersText(workers: Worker[]) {
  const count = (wanted: Worker["state"]) => workers.filter(({ state }) => state === wanted).length;
  const others = { draining: count("draining"), blocked: count("blocked"), "not responding": count("silent") };
  const texts = Object.entries(others).flatMap(([text, number]) => (number ? [`${number} ${text}`] : []));
  return (
    <>
      <span className={`state ${count("ready") ? "good" : "warn"}`}>
        {count("ready") ? "✓" : "✕"} {count("ready")} ready
      </span>
      {texts.length > 0 && <div className="sub">{texts.join(", ")}</div>}
    </>
  );
}

export default function System() {
  const isOperator = useSession().can("operator");
  const workers = useQuery(isOperator ? "workers" : null, (signal) => get<List<Worker>>("/v1/workers", {}, signal), {
    everyMs: 5000,
  });
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
              ...(workers.data ? [["Workers", workersText(workers.data.data)] as Fact] : []),
              ["Engine sandbox", sandbox(ready.data.sandbox)],
              ["Engine memory limits", ready.data.memory_limits.map((name) => LIMITS[name]).join(", ") || "no worker"],
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
