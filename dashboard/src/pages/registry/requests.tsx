import { type FormEvent, useState } from "react";
import { get, post } from "../../api/client";
import { type Query, useQuery } from "../../api/query";
import type { AliasRequest, AliasRequestPage } from "../../api/types";
import { capitalize } from "../../format";
import { Link } from "../../link";
import { useSession } from "../../sign-in";
import { announce } from "../../ui/announcer";
import { Dialog, Empty, Failure, Field, Pending, Time } from "../../ui/basics";
import { VerdictLevel } from "../job-progress";
import { actorText, allowedFor, changeText } from "./rules";

const EVERY_MS = 10_000;
const DONE = { approve: "approved", refuse: "refused", withdraw: "withdrawn" } as const;

type Decision = keyof typeof DONE;

/** The pending requests of a model, or of all models. */
export const useRequests = (model?: string) => useRequestPage({ state: "pending", model, limit: 100 });

function useRequestPage(params: Record<string, string | number | undefined>): Query<AliasRequestPage> {
  return useQuery(
    `alias requests ${JSON.stringify(params)}`,
    (signal) => get<AliasRequestPage>("/v1/registry/requests", params, signal),
    { everyMs: EVERY_MS },
  );
}

/** Pending requests, to be decided. Nothing while there is none. */
export function Requests({ query, onMoved }: { query: Query<AliasRequestPage>; onMoved: () => void }) {
  const [asking, setAsking] = useState<{ request: AliasRequest; decision: Decision }>();
  if (query.error && !query.data) return <Failure error={query.error} retry={query.reload} />;
  if (!query.data?.data.length) return null;
  return (
    <section className="card" aria-label="Pending requests">
      <h2>Pending requests</h2>
      <ul className="requests">
        {query.data.data.map((request) => (
          <li key={request.id} className="row spread">
            <div>
              <Link to="/registry" search={{ name: request.model }}>
                {request.model}@{request.alias}
              </Link>{" "}
              {changeText(request)}
              <VerdictOf request={request} />
              <div className="wrap">{request.reason}</div>
              <div className="sub">
                {actorText(request.asked_by)}, <Time at={request.created_at} />
              </div>
            </div>
            <Buttons request={request} onChoose={(decision) => setAsking({ request, decision })} />
          </li>
        ))}
      </ul>
      {asking && (
        <DecisionDialog
          {...asking}
          onClose={() => setAsking(undefined)}
          onDone={() => {
            setAsking(undefined);
            query.reload();
            onMoved();
          }}
        />
      )}
    </section>
  );
}

/** The verdict on the version that the alias would point to. Nothing for an alias that would be removed. */
function VerdictOf({ request: { to_version: version, verdict } }: { request: AliasRequest }) {
  if (version === null) return null;
  return <> · {verdict ? <VerdictLevel level={verdict} /> : "no verdict"}</>;
}

const SIGNS: Record<string, string> = { approved: "✓", refused: "✕", withdrawn: "⊘" };

/** The newest requests that were decided or withdrawn, each with who did it and their comment. Closed at first. */
export function DecidedRequests({ model }: { model?: string }) {
  const [isOpen, setIsOpen] = useState(false);
  return (
    <details open={isOpen} onToggle={(event) => setIsOpen(event.currentTarget.open)}>
      <summary>Decided requests</summary>
      {isOpen && <DecidedList model={model} />}
    </details>
  );
}

function DecidedList({ model }: { model?: string }) {
  const query = useRequestPage({ model, limit: 100 });
  const decided = query.data?.data.filter(({ state }) => state !== "pending");
  if (!decided) return <Pending query={query} />;
  if (!decided.length) return <Empty>No request was decided yet.</Empty>;
  return (
    <ul className="requests" aria-label="Decided requests">
      {decided.map((request) => (
        <li key={request.id}>
          <Link to="/registry" search={{ name: request.model }}>
            {request.model}@{request.alias}
          </Link>{" "}
          {changeText(request)}{" "}
          <strong className={request.state === "refused" ? "error" : undefined}>
            {SIGNS[request.state]} {request.state}
          </strong>
          <div className="wrap">{request.reason}</div>
          {request.comment && <div className="wrap">“{request.comment}”</div>}
          <div className="sub">
            asked by {actorText(request.asked_by)}; decided by {actorText(request.decided_by)},{" "}
            <Time at={request.decided_at} />
          </div>
        </li>
      ))}
    </ul>
  );
}

function Buttons({ request, onChoose }: { request: AliasRequest; onChoose: (decision: Decision) => void }) {
  const allowed = allowedFor(request, useSession().key);
  const about = `${request.model}@${request.alias}`;
  const shown: Decision[] = [
    ...(allowed.decide ? (["approve", "refuse"] as const) : []),
    ...(allowed.withdraw ? (["withdraw"] as const) : []),
  ];
  return (
    <div className="row">
      {shown.map((decision) => (
        <button
          type="button"
          key={decision}
          className={decision === "approve" ? "small primary" : "small"}
          aria-label={`${capitalize(decision)} ${about}`}
          onClick={() => onChoose(decision)}
        >
          {capitalize(decision)}
        </button>
      ))}
      {allowed.why && <span className="sub">{allowed.why}</span>}
    </div>
  );
}

function DecisionDialog({
  request,
  decision,
  onClose,
  onDone,
}: {
  request: AliasRequest;
  decision: Decision;
  onClose: () => void;
  onDone: () => void;
}) {
  const [comment, setComment] = useState("");
  const [error, setError] = useState<Error>();
  const decide = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      await post(`/v1/registry/requests/${request.id}/${decision}`, { comment: comment || null });
      announce(`The request is ${DONE[decision]}.`);
      onDone();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  const moves = decision === "approve" ? "The alias moves now." : "The alias stays as it is.";
  return (
    <Dialog title={`${capitalize(decision)} this request?`} onClose={onClose}>
      <p>
        <strong>
          {request.model}@{request.alias}
        </strong>
        : {changeText(request)}
        <VerdictOf request={request} />. {moves}
      </p>
      <p className="sub">
        {actorText(request.asked_by)}: {request.reason}
      </p>
      <form onSubmit={decide}>
        <Field label="Comment" hint="Optional. It is shown with the request and in the audit log.">
          {(props) => (
            <input {...props} maxLength={200} value={comment} onChange={(event) => setComment(event.target.value)} />
          )}
        </Field>
        {error && <Failure error={error} />}
        <div className="actions">
          <button type="button" onClick={onClose}>
            Go back
          </button>
          <button type="submit" className={decision === "approve" ? "primary" : "danger"}>
            {capitalize(decision)}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
