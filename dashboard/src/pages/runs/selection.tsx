import { useNavigate } from "@tanstack/react-router";
import { useState } from "react";
import { post } from "../../api/client";
import type { Job } from "../../api/types";
import { plural } from "../../format";
import { useSession } from "../../sign-in";
import { announce } from "../../ui/announcer";
import { Confirm } from "../../ui/basics";
import { ACTIONS } from "../../ui/states";
import { compareLink, MAX_NAMED } from "../compare/address";

/** The selected runs that can be cancelled. One that is not among `jobs`, on another page of the list, may be. */
export function cancellable(ids: string[], jobs: Pick<Job, "id" | "state">[]): string[] {
  const states = new Map(jobs.map((job) => [job.id, job.state]));
  return ids.filter((id) => {
    const state = states.get(id);
    return !state || ACTIONS[state].includes("cancel");
  });
}

/** What can be done with the runs that are ticked in the list. */
export function Selection({
  ids,
  jobs,
  clear,
  onCancelled,
}: {
  ids: string[];
  jobs: Job[];
  clear: () => void;
  onCancelled: () => void;
}) {
  const navigate = useNavigate();
  const mayWrite = useSession().can("jobs:write");
  const [cancelling, setCancelling] = useState(false);
  const possible = cancellable(ids, jobs);
  return (
    <section className="selection" aria-label="Selected runs">
      <strong>{plural(ids.length, "run")} selected</strong>
      <button
        type="button"
        disabled={ids.length < 2 || ids.length > MAX_NAMED}
        onClick={() => void navigate(compareLink(ids))}
      >
        Compare
      </button>
      {mayWrite && possible.length > 0 && (
        <button type="button" onClick={() => setCancelling(true)}>
          Cancel
        </button>
      )}
      <button type="button" onClick={clear}>
        Clear
      </button>
      {ids.length > MAX_NAMED && (
        <span className="faint">
          An address names up to {MAX_NAMED} runs. To compare more, filter the list and choose “Compare … results”.
        </span>
      )}
      {cancelling && (
        <CancelMany
          ids={possible}
          numOthers={ids.length - possible.length}
          onClose={() => setCancelling(false)}
          onDone={() => {
            clear();
            onCancelled();
          }}
        />
      )}
    </section>
  );
}

function CancelMany({
  ids,
  numOthers,
  onClose,
  onDone,
}: {
  ids: string[];
  numOthers: number;
  onClose: () => void;
  onDone: () => void;
}) {
  const cancel = async () => {
    const answers = await Promise.allSettled(ids.map((id) => post(`/v1/jobs/${id}/cancel`)));
    const failed = answers.filter((each) => each.status === "rejected");
    onDone();
    announce(`${plural(answers.length - failed.length, "run")} cancelled.`);
    if (failed[0])
      throw new Error(`${failed.length} of ${answers.length} runs could not be cancelled: ${failed[0].reason.message}`);
  };
  return (
    <Confirm
      title="Cancel these runs?"
      action={`Cancel ${plural(ids.length, "run")}`}
      onConfirm={cancel}
      onClose={onClose}
    >
      <p>Their progress is lost. {numOthers > 0 && "Runs that have ended are not affected."}</p>
    </Confirm>
  );
}
