import { useState } from "react";
import { CopyButton, Field, TabPanel, Tabs } from "../../ui/basics";
import { NoticeChoice } from "../../ui/notice-choice";
import { Part } from "./part";
import { HOSTILE, LONG, ONE_WORD } from "./samples";

const MANY_TABS = ["Overview", "Log", "Config", "Artifacts", "Events", "Try it"].map((text) => ({ id: text, text }));
const HOSTILE_TABS = [HOSTILE, ONE_WORD].map((text, index) => ({ id: `hostile-${index}`, text }));

export function ControlParts() {
  return (
    <>
      <Part name="Buttons">
        <div className="row">
          <button type="button">Default</button>
          <button type="button" className="primary">
            Primary
          </button>
          <button type="button" className="danger">
            Danger
          </button>
          <button type="button" className="small">
            Small
          </button>
          <button type="button" className="link">
            Link
          </button>
        </div>
      </Part>
      <Part name="Buttons, disabled">
        <div className="row">
          <button type="button" disabled>
            Default
          </button>
          <button type="button" className="primary" disabled>
            Primary
          </button>
          <button type="button" className="danger" disabled>
            Danger
          </button>
        </div>
      </Part>
      <Part name="CopyButton">
        <CopyButton text="bitfoundry presets" label="Copy command" />
      </Part>
      <Part name="Chips">
        <div className="chips">
          <button type="button" className="chip" aria-pressed="true">
            Pressed
          </button>
          <button type="button" className="chip" aria-pressed="false">
            Running <span className="count">12</span>
          </button>
          <span className="chip">{HOSTILE}</span>
          <span className="chip">{ONE_WORD}</span>
        </div>
      </Part>
      <FieldParts />
      <TabParts />
      <Part name="NoticeChoice">
        <NoticeChoice />
      </Part>
    </>
  );
}

function FieldParts() {
  return (
    <>
      <Part name="Field, plain">
        <Field label="Name">{(props) => <input {...props} placeholder="nightly" />}</Field>
        <Field label="Effort">
          {(props) => (
            <select {...props}>
              <option>Balanced</option>
            </select>
          )}
        </Field>
        <Field label="Config">{(props) => <textarea {...props} rows={2} defaultValue='{"preset": "w4a16"}' />}</Field>
      </Part>
      <Part name="Field, with a hint">
        <Field label="Sequence length" hint={LONG}>
          {(props) => <input {...props} inputMode="numeric" defaultValue="512" />}
        </Field>
      </Part>
      <Part name="Field, with an error">
        <Field label="Sequence length" error="The model reads at most 256 tokens.">
          {(props) => <input {...props} inputMode="numeric" defaultValue="512" />}
        </Field>
      </Part>
      <Part name="Field, disabled">
        <Field label="Device">{(props) => <input {...props} disabled defaultValue="h100" />}</Field>
        <div className="choices">
          <label>
            <input type="checkbox" disabled defaultChecked /> File to file
          </label>
          <label>
            <input type="radio" disabled /> Uniform
          </label>
        </div>
      </Part>
      <Part name="Field, narrow and hostile" isNarrow>
        <Field label={ONE_WORD} error={HOSTILE}>
          {(props) => <input {...props} defaultValue={HOSTILE} />}
        </Field>
      </Part>
    </>
  );
}

function TabParts() {
  const [shown, setShown] = useState("Overview");
  const [hostile, setHostile] = useState("hostile-0");
  return (
    <>
      <Part name="Tabs">
        <Tabs tabs={MANY_TABS} shown={shown} onShow={setShown} label="Tabs" />
        <TabPanel shown={shown}>{shown}</TabPanel>
      </Part>
      <Part name="Tabs, narrow and hostile" isNarrow>
        <Tabs tabs={HOSTILE_TABS} shown={hostile} onShow={setHostile} label="Hostile tabs" />
      </Part>
    </>
  );
}
