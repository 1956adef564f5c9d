import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { ProjectUsage } from "../api/types";
import { formatBytes, plural } from "../format";
import { LABELS } from "../labels";
import { useSession } from "../sign-in";
import { Facts, Pending, Time, Title } from "../ui/basics";
import { Table } from "../ui/table";

/** The project of this key: what it may use, and what it uses. */
export default function Project() {
  const { key } = useSession();
  return (
    <>
      <Title>Project</Title>
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
        <Table
          head={
            <>
              <th>Quota</th>
              <th>Used</th>
              <th>Limit</th>
            </>
          }
        >
          {query.data.quotas.map(({ quota, unit, used, limit }) => (
            <tr key={quota}>
              <td>
                <code>{quota}</code>
              </td>
              <td>
                {unit === "bytes" ? formatBytes(used) : plural(used, unit.replace(/s$/, ""))}{" "}
                {limit !== null && used >= limit && <span className="state warn">⚠ limit reached</span>}
              </td>
              <td>{limit === null ? "unlimited" : show(limit, unit)}</td>
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}
