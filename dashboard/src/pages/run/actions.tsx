import { useNavigate } from "@tanstack/react-router";
import { useState } from "react";
import { post, remove } from "../../api/client";
import type { Job } from "../../api/types";
import { Link } from "../../link";
import { useSession } from "../../sign-in";
import { Confirm, Failure } from "../../ui/basics";
import { ACTIONS, type Action } from "../../ui/states";
import { AddToRegistry } from "../registry/add";
import { ShareButton } from "./share";

const TEXTS: Record<Action, string> = {
  cancel: "Cancel",
  pause: "Pause",
  resume: "Resume",
  retry: "Retry",
  delete: "Delete",
};

const WARNINGS: Partial<Record<Action, string>> = {
  cancel: "Its progress is lost.",
  delete: "Its events, log and artifact files are deleted as well. This cannot be undone.",
};

/** The actions that the state of the run allows. Destructive ones ask for confirmation. */
export function RunActions({ job, onChange }: { job: Job; onChange: () => void }) {
  const session = useSession();
  const navigate = useNavigate();
  const [asking, setAsking] = useState<Action | null>(null);
  const [error, setError] = useState<Error>();
  if (!session.can("jobs:write")) return null;

  const act = async (action: Action) => {
    if (action === "delete") {
      await remove(`/v1/jobs/${job.id}`);
      return navigate({ to: "/" });
    }
    await post(`/v1/jobs/${job.id}/${action}`);
    onChange();
  };
  const press = (action: Action) => {
    setError(undefined);
    if (WARNINGS[action]) setAsking(action);
    else act(action).catch(setError);
  };
  const actions = ACTIONS[job.state];
  const isOffered = (action: Action) => action === "retry" && job.state === "failed"; // beside what has failed
  const buttons = (some: readonly Action[]) =>
    some.map((action) => (
      <button type="button" key={action} onClick={() => press(action)}>
        {TEXTS[action]}
      </button>
    ));
  return (
    <div className="row">
      {buttons(actions.filter((action) => action !== "delete" && !isOffered(action)))}
      <Link className="button" to="/jobs/new" search={{ from: job.id }}>
        Clone
      </Link>
      <Link className="button" to="/compare" search={{ job: [job.id] }}>
        Compare
      </Link>
      {job.state === "succeeded" && <AddToRegistry job={job} />}
      {job.state === "succeeded" && <ShareButton job={job} />}
      {buttons(actions.filter((action) => action === "delete"))}
      {error && <Failure error={error} />}
      {asking && (
        <Confirm
          title={`${TEXTS[asking]} this run?`}
          action={`${TEXTS[asking]} run`}
          onConfirm={() => act(asking)}
          onClose={() => setAsking(null)}
        >
          <p>{WARNINGS[asking]}</p>
        </Confirm>
      )}
    </div>
  );
}
