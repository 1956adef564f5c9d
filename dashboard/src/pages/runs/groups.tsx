// The runs by the values of a label, which the address names.
import { useNavigate } from "@tanstack/react-router";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { JobGroup, JobGroups, LabelNames } from "../../api/types";
import { Link } from "../../link";
import { listFiltersOf, type RunsSearch } from "../../search";
import { Empty, Time } from "../../ui/basics";
import { Listing } from "../../ui/table";
import { countsText } from "../sweeps/axes";

const EVERY_MS = 5000;
const NAMES_EVERY_MS = 30_000;

/** The choice of the label that groups the runs. Nothing while no run has a label. */
export function GroupField({ search }: { search: RunsSearch }) {
  const navigate = useNavigate({ from: "/" });
  const query = useQuery("labels", (signal) => get<LabelNames>("/v1/jobs/labels", {}, signal), {
    everyMs: NAMES_EVERY_MS,
  });
  const used = query.data?.data.map(({ name }) => name) ?? [];
  const names = search.group === undefined || used.includes(search.group) ? used : [search.group, ...used];
  if (!names.length) return null;
  return (
    <select
      aria-label="Group"
      value={search.group ?? ""}
      onChange={(event) =>
        void navigate({ search: { ...search, group: event.target.value || undefined, cursor: undefined } })
      }
    >
      <option value="">Not grouped</option>
      {names.map((name) => (
        <option key={name} value={name}>
          By label {name}
        </option>
      ))}
    </select>
  );
}

/** A row for each value of the label `by`, which opens the list of its runs. */
export function GroupTable({ search, by }: { search: RunsSearch; by: string }) {
  const params = { ...listFiltersOf(search), by };
  const query = useQuery(
    `groups ${JSON.stringify(params)}`,
    (signal) => get<JobGroups>("/v1/jobs/groups", params, signal),
    { everyMs: EVERY_MS },
  );
  return (
    <>
      <Listing
        query={query}
        empty={<Empty>No runs match these filters.</Empty>}
        head={
          <>
            <th>{by}</th>
            <th className="number">Runs</th>
            <th>States</th>
            <th>Newest</th>
          </>
        }
        row={(group) => <GroupRow key={JSON.stringify(group.value)} group={group} search={search} by={by} />}
      />
      {query.data?.has_more && (
        <p className="faint">
          The {query.data.data.length} values with the newest runs. Filter the runs to see others.
        </p>
      )}
    </>
  );
}

function GroupRow({ group, search, by }: { group: JobGroup; search: RunsSearch; by: string }) {
  const label = [...new Set([...(search.label ?? []), `${by}=${group.value}`])];
  return (
    <tr>
      <td className="wide">
        {group.value === null ? (
          <span className="faint">without this label</span>
        ) : (
          <Link to="/" search={{ ...search, group: undefined, label }}>
            {group.value || "(empty)"}
          </Link>
        )}
      </td>
      <td className="number">{group.total}</td>
      <td>{countsText(group.by_state)}</td>
      <td className="nowrap">
        <Time at={group.newest_at} />
      </td>
    </tr>
  );
}
