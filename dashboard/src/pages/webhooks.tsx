import { type FormEvent, useState } from "react";
import { get, post, remove, request } from "../api/client";
import { useQuery } from "../api/query";
import type { DeliveryPage, List, NewWebhook, Webhook } from "../api/types";
import { plural } from "../format";
import { ActionsHead, Code, Confirm, Dialog, Empty, Failure, Field, Loading, Time, Title } from "../ui/basics";
import { Listing } from "../ui/table";

const EVENTS = [
  ...["queued", "running", "retry_wait", "cancelling", "pausing", "paused", "succeeded", "failed", "cancelled"].map(
    (state) => `job.${state}`,
  ),
  ...["version_added", "alias_requested", "alias_moved", "alias_refused"].map((event) => `model.${event}`),
];

type Format = Webhook["format"];

/** Where messages go, in the order of the choice, and where the URL of each comes from. */
const FORMATS: Record<Format, { text: string; hint: string }> = {
  json: {
    text: "Program (signed JSON)",
    hint: "The URL of your program. It must use HTTPS and be reachable from the service.",
  },
  slack: {
    text: "Slack channel",
    hint: "The URL of an incoming webhook: in your Slack app, Incoming Webhooks, Add New Webhook.",
  },
  teams: {
    text: "Microsoft Teams channel",
    hint: "The URL of a workflow: in the channel's menu, Workflows, “When a Teams webhook request is received”.",
  },
};

export default function Webhooks() {
  const query = useQuery("webhooks", (signal) => get<List<Webhook>>("/v1/webhooks", {}, signal), { everyMs: 10_000 });
  const [creating, setCreating] = useState(false);
  const [made, setMade] = useState<NewWebhook | null>(null);
  const [shown, setShown] = useState<Webhook | null>(null);
  const [deleting, setDeleting] = useState<Webhook | null>(null);
  const [error, setError] = useState<Error>();
  const act = (work: Promise<unknown>) => work.then(query.reload, setError);
  return (
    <>
      <Title
        extra={
          <button type="button" className="primary" onClick={() => setCreating(true)}>
            New webhook
          </button>
        }
      >
        Webhooks
      </Title>
      {error && <Failure error={error} />}
      <Listing
        query={query}
        empty={
          <Empty>
            No webhooks yet. A webhook sends a message to a program, a Slack channel or a Teams channel when a job
            changes state, or a model of the registry moves.
          </Empty>
        }
        head={
          <>
            <th>URL</th>
            <th>Events</th>
            <th>State</th>
            <ActionsHead />
          </>
        }
        row={(webhook) => (
          <tr key={webhook.id}>
            <td>
              <button type="button" className="link" onClick={() => setShown(webhook)}>
                {webhook.url}
              </button>
              <div className="sub">{FORMATS[webhook.format].text}</div>
            </td>
            <td>{webhook.event_types.join(", ")}</td>
            <td>
              <WebhookState webhook={webhook} />
            </td>
            <td className="row">
              <button
                type="button"
                className="small"
                onClick={() => act(post(`/v1/webhooks/${webhook.id}/test`).then(() => setShown(webhook)))}
              >
                Test
              </button>
              {webhook.disabled_at && (
                <button
                  type="button"
                  className="small"
                  onClick={() => act(request("PATCH", `/v1/webhooks/${webhook.id}`, { body: { enabled: true } }))}
                >
                  Enable
                </button>
              )}
              <button type="button" className="small danger" onClick={() => setDeleting(webhook)}>
                Delete
              </button>
            </td>
          </tr>
        )}
      />
      {creating && (
        <NewWebhookDialog
          onClose={() => setCreating(false)}
          onMade={(webhook) => {
            setCreating(false);
            if (webhook.format === "json") setMade(webhook); // channels verify no signature
            query.reload();
          }}
        />
      )}
      {made && (
        <Dialog title="Webhook secret" onClose={() => setMade(null)}>
          <p>Use this secret to verify the signature of each request. Copy it now: it will not be shown again.</p>
          <Code text={made.secret} label="New webhook secret" />
        </Dialog>
      )}
      {shown && <Deliveries webhook={shown} onClose={() => setShown(null)} />}
      {deleting && (
        <Confirm
          title="Delete this webhook?"
          action="Delete webhook"
          onClose={() => setDeleting(null)}
          onConfirm={async () => {
            await remove(`/v1/webhooks/${deleting.id}`);
            query.reload();
          }}
        >
          <p>{deleting.url} will receive no more events, including pending deliveries.</p>
        </Confirm>
      )}
    </>
  );
}

function WebhookState({ webhook }: { webhook: Webhook }) {
  if (webhook.disabled_at) {
    return (
      <>
        <span className="state bad">✕ Disabled</span>
        <div className="sub">{webhook.disabled_reason}</div>
      </>
    );
  }
  if (webhook.failing_since) {
    return (
      <>
        <span className="state warn">⚠ Failing</span>{" "}
        <span className="sub">
          since <Time at={webhook.failing_since} />
        </span>
      </>
    );
  }
  return <span className="state good">✓ Enabled</span>;
}

function NewWebhookDialog({ onClose, onMade }: { onClose: () => void; onMade: (webhook: NewWebhook) => void }) {
  const [format, setFormat] = useState<Format>("json");
  const [url, setUrl] = useState("");
  const [events, setEvents] = useState(["job.succeeded", "job.failed"]);
  const [error, setError] = useState<Error>();
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    try {
      onMade(await post<NewWebhook>("/v1/webhooks", { url, format, event_types: events }));
    } catch (caught) {
      setError(caught as Error);
    }
  };
  const toggle = (name: string) =>
    setEvents((old) => (old.includes(name) ? old.filter((each) => each !== name) : [...old, name]));
  return (
    <Dialog title="New webhook" onClose={onClose}>
      <form onSubmit={submit}>
        <Field label="Send messages to">
          {(props) => (
            <select {...props} value={format} onChange={(event) => setFormat(event.target.value as Format)}>
              {Object.entries(FORMATS).map(([name, { text }]) => (
                <option key={name} value={name}>
                  {text}
                </option>
              ))}
            </select>
          )}
        </Field>
        <Field label="URL" hint={FORMATS[format].hint}>
          {(props) => (
            <input
              {...props}
              type="url"
              required
              placeholder={format === "json" ? "https://ci.example.org/bitfoundry" : undefined}
              value={url}
              onChange={(event) => setUrl(event.target.value)}
            />
          )}
        </Field>
        <fieldset>
          <legend>Events</legend>
          <div className="choices">
            {EVENTS.map((name) => (
              <label key={name}>
                <input type="checkbox" checked={events.includes(name)} onChange={() => toggle(name)} /> {name}
              </label>
            ))}
          </div>
        </fieldset>
        {error && <Failure error={error} />}
        <div className="actions">
          <button type="submit" className="primary" disabled={!url || !events.length}>
            Create webhook
          </button>
        </div>
      </form>
    </Dialog>
  );
}

const DELIVERY_STATES: Record<string, string> = { pending: "◷ Pending", delivered: "✓ Delivered", failed: "✕ Failed" };

function Deliveries({ webhook, onClose }: { webhook: Webhook; onClose: () => void }) {
  const path = `/v1/webhooks/${webhook.id}/deliveries`;
  const query = useQuery(path, (signal) => get<DeliveryPage>(path, { limit: 50 }, signal), { everyMs: 3000 });
  const [error, setError] = useState<Error>();
  return (
    <Dialog title={webhook.url} onClose={onClose}>
      {error && <Failure error={error} />}
      {query.error && <Failure error={query.error} retry={query.reload} />}
      {!query.data && !query.error && <Loading />}
      {query.data?.data.length === 0 && <Empty>No deliveries yet.</Empty>}
      <table>
        <tbody>
          {query.data?.data.map((delivery) => (
            <tr key={delivery.id}>
              <td>
                {delivery.event_type}
                <div className="sub">
                  <Time at={delivery.created_at} />
                </div>
              </td>
              <td>
                {DELIVERY_STATES[delivery.state]}
                {delivery.tries.slice(-1).map((each) => (
                  <div key={each.at} className="sub">
                    {each.status ?? each.error} in {each.latency_ms} ms, {plural(delivery.num_tries, "attempt")}
                  </div>
                ))}
              </td>
              <td>
                {delivery.state !== "pending" && (
                  <button
                    type="button"
                    className="small"
                    onClick={() => post(`${path}/${delivery.id}/redeliver`).then(query.reload, setError)}
                  >
                    Resend
                  </button>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Dialog>
  );
}
