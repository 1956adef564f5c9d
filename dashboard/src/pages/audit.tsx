import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { AuditPage } from "../api/types";
import { OPERATOR } from "../labels";
import { Link, navigate, type Place, withParams } from "../router";
import { Empty, Pending, scrollable, Time, Title } from "../ui/basics";

export default function Audit({ place: { search } }: { place: Place }) {
  const params = {
    action: search.get("action"),
    object_id: search.get("object_id"),
    cursor: search.get("cursor"),
    limit: 100,
  };
  const query = useQuery(`audit ${JSON.stringify(params)}`, (signal) => get<AuditPage>("/v1/audit", params, signal), {
    everyMs: 10_000,
  });
  const isFiltered = Boolean(params.action || params.object_id);
  const to = (changes: Record<string, string | null>) => `/audit${withParams(search, { cursor: null, ...changes })}`;
  return (
    <>
      <Title>Audit</Title>
      <form
        className="row field"
        onSubmit={(event) => {
          event.preventDefault();
          const form = new FormData(event.currentTarget);
          navigate(
            to({ action: String(form.get("action")) || null, object_id: String(form.get("object_id")) || null }),
          );
        }}
      >
        <input
          name="action"
          aria-label="Action"
          placeholder="Action, e.g. job.cancel"
          defaultValue={params.action ?? ""}
        />
        <input name="object_id" aria-label="Object ID" placeholder="Object ID" defaultValue={params.object_id ?? ""} />
        <button type="submit">Filter</button>
        {isFiltered && <Link to="/audit">Clear filters</Link>}
      </form>
      <Pending query={query} />
      {query.data?.data.length === 0 && <Empty>No audit entries{isFiltered ? " match these filters" : " yet"}.</Empty>}
      {query.data && query.data.data.length > 0 && (
        <div className="table" ref={scrollable}>
          <table>
            <thead>
              <tr>
                <th>Time</th>
                <th>API key</th>
                <th>Action</th>
                <th>Object</th>
                <th>Details</th>
              </tr>
            </thead>
            <tbody>
              {query.data.data.map((entry) => (
                <tr key={entry.id}>
                  <td className="nowrap">
                    <Time at={entry.at} />
                  </td>
                  <td>{entry.key_id ? <code>{entry.key_id}</code> : OPERATOR}</td>
                  <td>
                    <Link to={to({ action: entry.action })}>{entry.action}</Link>
                  </td>
                  <td>
                    <Link to={to({ object_id: entry.object_id })}>{entry.object_id}</Link>
                  </td>
                  <td>
                    {Object.keys(entry.detail).length > 0 && <code>{JSON.stringify(entry.detail).slice(0, 300)}</code>}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <div className="row spread">
        {params.cursor ? <Link to={to({})}>← Newest</Link> : <span />}
        {query.data?.next_cursor && (
          <Link to={`/audit${withParams(search, { cursor: query.data.next_cursor })}`}>Older →</Link>
        )}
      </div>
    </>
  );
}
