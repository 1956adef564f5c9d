import { type FormEvent, useState } from "react";
import { get, post, request } from "../../api/client";
import { useQuery } from "../../api/query";
import {
  type Job,
  type ProtectedAliases,
  type RegistryVersion,
  type RegistryVersionPage,
  summaryOf,
} from "../../api/types";
import { formatBytes, formatNumber, shortId } from "../../format";
import { LABELS } from "../../labels";
import { Link } from "../../link";
import { useSession } from "../../sign-in";
import { announce } from "../../ui/announcer";
import {
  ActionsHead,
  Code,
  CopyButton,
  Dialog,
  Empty,
  Failure,
  Field,
  Pending,
  Term,
  Time,
  Title,
} from "../../ui/basics";
import { Table } from "../../ui/table";
import { VerdictLevel } from "../job-progress";
import { DecidedRequests, Requests, useRequests } from "./requests";
import { ALIAS, actorText } from "./rules";
import { ShippingWarning } from "./shipping-warning";

const EVERY_MS = 10_000;

/** The versions of a model with their aliases, and the requests that wait for a decision. */
export function ModelVersions({ name, cursor }: { name: string; cursor?: string }) {
  const params = { cursor, limit: 50 };
  const place = `/v1/registry/models/${encodeURIComponent(name)}`;
  const query = useQuery(
    `versions ${name} ${JSON.stringify(params)}`,
    (signal) => get<RegistryVersionPage>(`${place}/versions`, params, signal),
    { everyMs: EVERY_MS },
  );
  const [promoting, setPromoting] = useState<RegistryVersion>();
  const requests = useRequests(name);
  const versions = query.data?.data;
  return (
    <>
      <Title>{name}</Title>
      <p className="row">
        <Link to="/registry">All models</Link>
      </p>
      <Requests query={requests} onMoved={query.reload} />
      <Pending query={query} />
      {versions?.length === 0 && <Empty>This model has no version.</Empty>}
      {versions && versions.length > 0 && (
        <>
          <VersionTable versions={versions} onPromote={setPromoting} />
          <Code text={`bitfoundry pull ${name}@${bestName(versions)} -o ${name}`} label="Download command" />
          <DecidedRequests model={name} />
        </>
      )}
      <div className="row spread">
        {cursor ? (
          <Link to="/registry" search={{ name }}>
            ← Newest
          </Link>
        ) : (
          <span />
        )}
        {query.data?.next_cursor && (
          <Link to="/registry" search={{ name, cursor: String(query.data.next_cursor) }}>
            Older →
          </Link>
        )}
      </div>
      {promoting && (
        <PromoteDialog
          place={place}
          version={promoting}
          onClose={() => setPromoting(undefined)}
          onDone={() => {
            setPromoting(undefined);
            query.reload();
            requests.reload();
          }}
        />
      )}
    </>
  );
}

/** The alias of the newest version that has one, else the number of the newest. */
function bestName(versions: RegistryVersion[]): string | number {
  return versions.find(({ aliases }) => aliases.length)?.aliases.at(-1) ?? versions[0]?.version ?? 1;
}

function VersionTable({
  versions,
  onPromote,
}: {
  versions: RegistryVersion[];
  onPromote: (version: RegistryVersion) => void;
}) {
  const mayWrite = useSession().can("jobs:write");
  return (
    <Table
      head={
        <>
          <th className="number">Version</th>
          <th>Aliases</th>
          <th>Run</th>
          <th>Format</th>
          <th className="number">Size</th>
          <th>Verdict</th>
          <th className="number">
            <Term>{LABELS.klMean}</Term>
          </th>
          <th>Added</th>
          <ActionsHead />
        </>
      }
    >
      {versions.map((version) => (
        <tr key={version.version}>
          <td className="number">{version.version}</td>
          <td>{version.aliases.length ? <strong>{version.aliases.join(", ")}</strong> : "–"}</td>
          <td>
            <Link to="/jobs/$id" params={{ id: version.job_id }} title={version.job_id}>
              {version.name ?? shortId(version.job_id)}
            </Link>
            <div className="sub nowrap">
              <code title={version.sha256}>{version.sha256.slice(0, 12)}…</code>{" "}
              <CopyButton text={version.sha256} label="Copy SHA-256" />
            </div>
          </td>
          <td>{version.export.join(", ")}</td>
          <td className="number">{formatBytes(version.bytes)}</td>
          <td>{version.verdict ? <VerdictLevel level={version.verdict} /> : "–"}</td>
          <td className="number">{formatNumber(version.kl_mean, 3)}</td>
          <td>
            <Time at={version.created_at} />
            <div className="sub">{actorText(version.added_by)}</div>
          </td>
          <td>
            {mayWrite && (
              <button
                type="button"
                className="small"
                aria-label={`Set alias of version ${version.version}`}
                onClick={() => onPromote(version)}
              >
                Set alias
              </button>
            )}
          </td>
        </tr>
      ))}
    </Table>
  );
}

/** Points an alias to a version. A protected one is asked for, with the reason. */
function PromoteDialog({
  place,
  version,
  onClose,
  onDone,
}: {
  place: string;
  version: RegistryVersion;
  onClose: () => void;
  onDone: () => void;
}) {
  const policy = useQuery("protected aliases", (signal) =>
    get<ProtectedAliases>("/v1/registry/protected-aliases", {}, signal),
  );
  const job = useQuery(`job ${version.job_id}`, (signal) => get<Job>(`/v1/jobs/${version.job_id}`, {}, signal));
  const { verdict, goal } = (job.data && summaryOf(job.data)) ?? {};
  const [alias, setAlias] = useState("");
  const [reason, setReason] = useState("");
  const [error, setError] = useState<Error>();
  const isProtected = policy.data?.aliases.includes(alias) ?? false;
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      if (isProtected) await post(`${place}/requests`, { alias, version: version.version, reason });
      else await request("PUT", `${place}/aliases/${alias}`, { body: { version: version.version } });
      announce(isProtected ? "The request waits for approval." : `${alias} is version ${version.version} now.`);
      onDone();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  return (
    <Dialog title={`Set alias of version ${version.version}`} onClose={onClose}>
      <ShippingWarning level={version.verdict} sentence={verdict?.sentence ?? verdict?.reason} goal={goal} />
      <Pending query={policy} />
      {policy.data && (
        <form onSubmit={submit}>
          <Field
            label="Alias"
            hint={isProtected ? "Protected: another admin must approve it." : "One lower-case word, such as candidate."}
          >
            {(props) => (
              <input
                {...props}
                required
                pattern={ALIAS}
                list="aliases"
                value={alias}
                onChange={(event) => setAlias(event.target.value)}
              />
            )}
          </Field>
          <datalist id="aliases">
            {[...new Set(["candidate", ...policy.data.aliases])].map((each) => (
              <option key={each} value={each} />
            ))}
          </datalist>
          {isProtected && (
            <Field label="Reason" hint="For the one who approves.">
              {(props) => (
                <input
                  {...props}
                  required
                  maxLength={200}
                  value={reason}
                  onChange={(event) => setReason(event.target.value)}
                />
              )}
            </Field>
          )}
          {error && <Failure error={error} />}
          <div className="actions">
            <button type="submit" className="primary">
              {isProtected ? "Request approval" : "Set alias"}
            </button>
          </div>
        </form>
      )}
    </Dialog>
  );
}
