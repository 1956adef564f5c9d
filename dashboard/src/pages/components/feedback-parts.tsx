import { useState } from "react";
import { announce } from "../../ui/announcer";
import { Confirm, Dialog, Empty, Failure, Loading, Pending } from "../../ui/basics";
import { PageFailure } from "../../ui/page-failure";
import { Part } from "./part";
import { HOSTILE, LONG, LONG_PROBLEM, ONE_WORD, PROBLEM, QUERIES } from "./samples";

const ignore = () => undefined;

export function FeedbackParts() {
  return (
    <>
      <Part name="Loading">
        <Loading />
        <Loading what="The service is not responding. Retrying" />
      </Part>
      <Part name="Empty">
        <Empty>No runs yet.</Empty>
      </Part>
      <Part name="Empty, narrow and hostile" isNarrow>
        <Empty>{HOSTILE}</Empty>
      </Part>
      {Object.entries(QUERIES).map(([state, query]) => (
        <Part key={state} name={`Pending, ${state}`}>
          <Pending query={query} />
        </Part>
      ))}
      <Part name="Failure">
        <Failure error={PROBLEM} retry={ignore} />
      </Part>
      <Part name="Failure, unknown">
        <Failure error={new Error("The service is not responding.")} />
      </Part>
      <Part name="Failure, long, narrow and hostile" isNarrow>
        <Failure error={LONG_PROBLEM} retry={ignore} />
      </Part>
      <Part name="Notices">
        <div className="notice">{LONG}</div>
        <div className="notice good">Downloaded and verified.</div>
        <div className="notice warn">⚠ This data may be out of date.</div>
        <div className="notice bad">{ONE_WORD}</div>
      </Part>
      <Part name="PageFailure, a bug">
        <PageFailure error={new Error(`Cannot read properties of undefined: ${HOSTILE}`)} />
      </Part>
      <Part name="PageFailure, not loaded">
        <PageFailure error={new Error("Failed to fetch dynamically imported module: run.js")} />
      </Part>
      <DialogParts />
    </>
  );
}

const succeed = () => Promise.resolve();
const refuse = () => Promise.reject(LONG_PROBLEM);
const neverEnd = () => new Promise<void>(ignore);

const CONFIRMED: Record<string, () => Promise<void>> = {
  Confirm: succeed,
  "Confirm, failing": refuse,
  "Confirm, busy": neverEnd,
};
const DIALOGS = ["Dialog", "Dialog, long and hostile", ...Object.keys(CONFIRMED)];

function DialogParts() {
  const [open, setOpen] = useState<string>();
  const close = () => setOpen(undefined);
  const onConfirm = open ? CONFIRMED[open] : undefined;
  return (
    <>
      <Part name="Dialogs">
        <div className="row">
          {DIALOGS.map((name) => (
            <button type="button" key={name} onClick={() => setOpen(name)}>
              Open {name}
            </button>
          ))}
        </div>
      </Part>
      <Part name="Announcer">
        <button type="button" onClick={() => announce("Run state: Succeeded.")}>
          Announce a change
        </button>
      </Part>
      {open === "Dialog" && (
        <Dialog title="Keyboard shortcuts" onClose={close}>
          <p>j and k move in the list.</p>
        </Dialog>
      )}
      {open === "Dialog, long and hostile" && (
        <Dialog title={HOSTILE + ONE_WORD} onClose={close}>
          <p className="wrap">{LONG.repeat(12) + ONE_WORD}</p>
        </Dialog>
      )}
      {onConfirm && (
        <Confirm title="Delete this run?" action="Delete" onConfirm={onConfirm} onClose={close}>
          <p>Its files are deleted, too.</p>
        </Confirm>
      )}
    </>
  );
}
