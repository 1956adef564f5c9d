import { getRouteApi, useNavigate } from "@tanstack/react-router";
import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { AuditPage } from "../api/types";
import { OPERATOR } from "../labels";
import { Link } from "../link";
import { Empty, Time, Title } from "../ui/basics";
import { Listing, Pages } from "../ui/table";

const route = getRouteApi("/audit");

export default function Audit() {
  const { action, object_id, cursor } = route.useSearch();
  const navigate = useNavigate();
  const params = { action, object_id, cursor, limit: 100 };
  const query = useQuery(`audit ${JSON.stringify(params)}`, (signal) => get<AuditPage>("/v1/audit", params, signal), {
    everyMs: 10_000,
  });
  const isFiltered = Boolean(action || object_id);
  const filter = { action, object_id };
  return (
    <>
      <Title>Audit log</Title>
      <form
        className="row field"
        onSubmit={(event) => {
          event.preventDefault();
          const form = new FormData(event.currentTarget);
          const given = (name: string) => String(form.get(name)) || undefined;
          void navigate({ to: "/audit", search: { action: given("action"), object_id: given("object_id") } });
        }}
      >
        <input name="action" aria-label="Action" placeholder="Action, e.g. job.cancel" defaultValue={action ?? ""} />
        <input name="object_id" aria-label="Object ID" placeholder="Object ID" defaultValue={object_id ?? ""} />
        <button type="submit">Filter</button>
        {isFiltered && <Link to="/audit">Clear filters</Link>}
      </form>
      <Listing
        query={query}
        empty={<Empty>No audit entries{isFiltered ? " match these filters" : " yet"}.</Empty>}
        head={
          <>
            <th>Time</th>
            <th>API key</th>
            <th>Member</th>
            <th>Action</th>
            <th>Object</th>
            <th>Details</th>
          </>
        }
        row={(entry) => (
          <tr key={entry.id}>
            <td className="nowrap">
              <Time at={entry.at} />
            </td>
            <td>{entry.key_id ? <code className="nowrap">{entry.key_id}</code> : OPERATOR}</td>
            <td>{entry.member?.name ?? "–"}</td>
            <td>
              <Link to="/audit" search={{ ...filter, action: entry.action }}>
                {entry.action}
              </Link>
            </td>
            <td>
              <Link to="/audit" search={{ ...filter, object_id: entry.object_id }}>
                {entry.object_id}
              </Link>
            </td>
            <td className="wide">
              {Object.keys(entry.detail).length > 0 && <code>{JSON.stringify(entry.detail).slice(0, 300)}</code>}
            </td>
          </tr>
        )}
      />
      <Pages
        back={
          cursor && (
            <Link to="/audit" search={filter}>
              ← Newest
            </Link>
          )
        }
        next={
          query.data?.next_cursor && (
            <Link to="/audit" search={{ ...filter, cursor: query.data.next_cursor }}>
              Older →
            </Link>
          )
        }
      />
    </>
  );
}
