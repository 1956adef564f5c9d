import { type FormEvent, useState } from "react";
import { get, post, remove, request } from "../api/client";
import { useQuery } from "../api/query";
import type { HubToken, Key, List, NewKey } from "../api/types";
import { LABELS } from "../labels";
import { useSession } from "../sign-in";
import { ActionsHead, Confirm, Dialog, Empty, Failure, Field, Time, Title } from "../ui/basics";
import { Listing } from "../ui/table";
import { ExpiryField, expiryOf, NewKeyShown } from "./new-key";

const SCOPES: [string, string][] = [
  ["jobs:read", "View jobs, preview plans and download artifacts"],
  ["jobs:write", "Submit, change and delete jobs"],
  ["jobs:chat", "Chat with the results of jobs, on a worker"],
  ["admin", "Manage the project: members, keys, tokens, webhooks and audit log"],
  ["operator", "Manage the service: projects and workers"],
];

export default function Keys() {
  const query = useQuery("keys", (signal) => get<List<Key>>("/v1/keys", {}, signal));
  const [creating, setCreating] = useState(false);
  const [made, setMade] = useState<NewKey | null>(null);
  const [asking, setAsking] = useState<{ key: Key; action: "rotate" | "revoke" } | null>(null);
  const session = useSession();
  const act = async (key: Key, action: "rotate" | "revoke") => {
    const answer = await post<Key | NewKey>(
      `/v1/keys/${key.id}/${action}`,
      action === "rotate" ? { overlap_s: 3600 } : undefined,
    );
    if ("key" in answer) setMade(answer);
    query.reload();
  };
  return (
    <>
      <Title
        extra={
          <button type="button" className="primary" onClick={() => setCreating(true)}>
            New key
          </button>
        }
      >
        API keys
      </Title>
      <Listing
        query={query}
        empty={<Empty>No keys.</Empty>}
        head={
          <>
            <th>Key</th>
            <th>Member</th>
            <th>{LABELS.permissions}</th>
            <th>State</th>
            <th>Created</th>
            <th>Last used</th>
            <ActionsHead />
          </>
        }
        row={(key) => (
          <tr key={key.id}>
            <td>
              <strong>{key.name}</strong> {key.id === session.key.id && <span className="faint">current</span>}
              <div className="sub">
                <code className="nowrap">{key.prefix}…</code>
              </div>
            </td>
            <td>{key.member?.name ?? "–"}</td>
            <td>{key.scopes.join(", ")}</td>
            <td>
              <KeyState value={key} />
            </td>
            <td>
              <Time at={key.created_at} />
            </td>
            <td>
              <Time at={key.last_used_at} />
            </td>
            <td>
              {!key.revoked_at && (
                <span className="row">
                  <button type="button" className="small" onClick={() => setAsking({ key, action: "rotate" })}>
                    Rotate
                  </button>
                  <button type="button" className="small danger" onClick={() => setAsking({ key, action: "revoke" })}>
                    Revoke
                  </button>
                </span>
              )}
            </td>
          </tr>
        )}
      />
      <HubTokens />
      {creating && (
        <NewKeyDialog
          onClose={() => setCreating(false)}
          onMade={(key) => {
            setCreating(false);
            setMade(key);
            query.reload();
          }}
        />
      )}
      {made && <NewKeyShown made={made} onClose={() => setMade(null)} />}
      {asking && (
        <Confirm
          title={`${asking.action === "rotate" ? "Rotate" : "Revoke"} ${asking.key.name}?`}
          action={asking.action === "rotate" ? "Rotate key" : "Revoke key"}
          onClose={() => setAsking(null)}
          onConfirm={() => act(asking.key, asking.action)}
        >
          <p>
            {asking.action === "rotate"
              ? "The key gets a new secret. The current secret works for one more hour."
              : "The key stops working at once. This cannot be undone."}
          </p>
          {asking.key.id === session.key.id && <p>⚠ You are signed in with this key.</p>}
        </Confirm>
      )}
    </>
  );
}

function KeyState({ value }: { value: Key }) {
  if (value.revoked_at) return <span className="state bad">✕ Revoked</span>;
  if (value.expires_at && Date.parse(value.expires_at) < Date.now())
    return <span className="state warn">◷ Expired</span>;
  return (
    <>
      <span className="state good">✓ Valid</span>
      {value.expires_at && (
        <div className="sub">
          until <Time at={value.expires_at} />
        </div>
      )}
    </>
  );
}

function NewKeyDialog({ onClose, onMade }: { onClose: () => void; onMade: (key: NewKey) => void }) {
  const [name, setName] = useState("");
  const session = useSession();
  const [scopes, setScopes] = useState(["jobs:read", "jobs:write"].filter(session.can));
  const [until, setUntil] = useState("");
  const [error, setError] = useState<Error>();
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    try {
      onMade(await post<NewKey>("/v1/keys", { name, scopes, ...expiryOf(until) }));
    } catch (caught) {
      setError(caught as Error);
    }
  };
  const toggle = (scope: string) =>
    setScopes((old) => (old.includes(scope) ? old.filter((each) => each !== scope) : [...old, scope]));
  return (
    <Dialog title="New key" onClose={onClose}>
      <form onSubmit={submit}>
        <Field label="Name" hint="Who or what uses this key.">
          {(props) => <input {...props} required value={name} onChange={(event) => setName(event.target.value)} />}
        </Field>
        <fieldset>
          <legend>{LABELS.permissions}</legend>
          {SCOPES.filter(([scope]) => session.can(scope)).map(([scope, what]) => (
            <p key={scope}>
              <label>
                <input type="checkbox" checked={scopes.includes(scope)} onChange={() => toggle(scope)} />{" "}
                <strong>{scope}</strong> {what}
              </label>
            </p>
          ))}
        </fieldset>
        <ExpiryField until={until} onChange={setUntil} />
        {error && <Failure error={error} />}
        <div className="actions">
          <button type="submit" className="primary" disabled={!name || !scopes.length}>
            Create key
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function HubTokens() {
  const query = useQuery("hub-tokens", (signal) => get<List<HubToken>>("/v1/hub-tokens", {}, signal));
  const [name, setName] = useState("");
  const [token, setToken] = useState("");
  const [error, setError] = useState<Error>();
  const [deleting, setDeleting] = useState("");
  const put = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      await request("PUT", `/v1/hub-tokens/${encodeURIComponent(name)}`, { body: { token } });
      setName("");
      setToken("");
      query.reload();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  return (
    <section className="card">
      <h2>Hugging Face Hub tokens</h2>
      <p className="hint">
        For private and gated models. Tokens are stored encrypted and never shown; jobs refer to them by name.
      </p>
      {query.data?.data.length === 0 && <Empty>No tokens yet.</Empty>}
      <table>
        <tbody>
          {query.data?.data.map((each) => (
            <tr key={each.name}>
              <td>
                <strong>{each.name}</strong>
              </td>
              <td>
                Updated <Time at={each.updated_at} />
              </td>
              <td>
                <button type="button" className="small danger" onClick={() => setDeleting(each.name)}>
                  Delete
                </button>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <form onSubmit={put} className="fields">
        <Field label="Token name">
          {(props) => (
            <input
              {...props}
              required
              pattern="[a-z][a-z0-9\-]{0,62}"
              placeholder="team"
              value={name}
              onChange={(event) => setName(event.target.value)}
            />
          )}
        </Field>
        <Field label="Token">
          {(props) => (
            <input
              {...props}
              type="password"
              autoComplete="off"
              required
              value={token}
              onChange={(event) => setToken(event.target.value)}
            />
          )}
        </Field>
        <div className="field">
          <button type="submit">Save token</button>
        </div>
      </form>
      {error && <Failure error={error} />}
      {deleting && (
        <Confirm
          title={`Delete the token ${deleting}?`}
          action="Delete token"
          onClose={() => setDeleting("")}
          onConfirm={async () => {
            await remove(`/v1/hub-tokens/${encodeURIComponent(deleting)}`);
            query.reload();
          }}
        >
          <p>Jobs that use it and have not downloaded their model yet will fail.</p>
        </Confirm>
      )}
    </section>
  );
}
