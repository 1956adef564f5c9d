import { useState } from "react";
import presetChanges from "../../../preset-changes.json";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { List, Preset, Target } from "../../api/types";
import { COLUMN_PLACEHOLDER, EFFORT_TEXTS, LABELS } from "../../labels";
import { Field } from "../../ui/basics";
import { HUB_TARGET, TargetFields } from "../target-fields";
import {
  type Algorithm,
  type Body,
  chainOf,
  configOf,
  effortOf,
  labelsText,
  presetOf,
  readLabels,
  START_MIX,
  withGoal,
  withMix,
  withPreset,
  withValue,
} from "./body";
import { ChainFields } from "./chain-fields";
import { Choice, type Props, Scoped, Value } from "./fields";
import { GoalFields } from "./goal-fields";
import { MeasureFields } from "./measure-fields";
import { MixFields } from "./mix-fields";
import { ModelFields } from "./model-fields";
import type { Schema } from "./schema";
import { SchemaForm } from "./schema-form";
import { TextFields } from "./text-fields";

/** The changes that a job can make to its preset; `empty` is shown while one is not set. */
export const CHANGES: Record<string, Schema & { empty: string }> = presetChanges.properties;

/** The section "More settings": its owner knows if it is open, so that it stays so while another tab is shown. */
interface More {
  isOpen: boolean;
  onToggle: (isOpen: boolean) => void;
}

/** `planned`: the algorithms of the current request's plan, once it is there. */
export function JobForm({ more, planned, ...props }: Props & { more: More; planned?: Algorithm[] }) {
  const { body } = props;
  const query = useQuery("presets", (signal) => get<List<Preset>>("/v1/presets", {}, signal));
  const presets = query.data?.data ?? [];
  const preset = presets.find((each) => each.name === presetOf(body) || each.aliases.includes(presetOf(body) ?? ""));
  const recommended = planned ?? (preset?.recipes[effortOf(body)] as Algorithm[] | undefined) ?? [];
  return (
    <>
      <ModelFields {...props} />
      <SchemeFields {...props} presets={presets} preset={preset} recommended={recommended} />
      <details open={more.isOpen} onToggle={(event) => more.onToggle(event.currentTarget.open)}>
        <summary>More settings: algorithms, calibration, evaluation, publishing, name and limits</summary>
        {more.isOpen && <ChainFields {...props} recommended={recommended} />}
        <CalibrationFields {...props} />
        <MeasureFields {...props} />
        <PublishFields {...props} />
        <OtherFields {...props} />
      </details>
    </>
  );
}

function SchemeFields(props: Props & { presets: Preset[]; preset?: Preset; recommended: Algorithm[] }) {
  const { body, onChange, presets, preset, recommended, errorAt } = props;
  const own = chainOf(body);
  const isOwn = !body.goal && !body.mix && presetOf(body) === null;
  const schema = useQuery(isOwn ? "config-schema" : null, (signal) => get<Schema>("/v1/config-schema", {}, signal));
  const exports = preset?.exports ?? [...new Set(presets.flatMap((each) => each.exports))].sort();
  const usual = !body.mix && preset ? ` (${preset.exports[0]})` : "";
  const choose = (name: string) => {
    const next = presets.find((each) => each.name === name);
    if (next) onChange(withPreset(body, next));
  };
  return (
    <fieldset>
      <legend>Scheme</legend>
      <div className="choices field">
        <label>
          <input type="radio" name="schemes" checked={!!body.goal} onChange={() => onChange(withGoal(body))} /> For a{" "}
          {LABELS.goal.toLowerCase()}
        </label>
        <label>
          <input
            type="radio"
            name="schemes"
            checked={!body.mix && !body.goal}
            onChange={() => onChange(withMix(body, undefined))}
          />{" "}
          Uniform
        </label>
        <label>
          <input type="radio" name="schemes" checked={!!body.mix} onChange={() => onChange(withMix(body, START_MIX))} />{" "}
          {LABELS.mix} (chosen automatically)
        </label>
      </div>
      {body.goal && <GoalFields {...props} goal={body.goal} />}
      {body.mix && <MixFields {...props} mix={body.mix} />}
      {!isOwn && !body.mix && !body.goal && (
        <>
          <Field label="Preset" hint={preset?.title} error={errorAt("/config/preset") ?? errorAt("/config")}>
            {(own) => (
              <select
                {...own}
                value={preset?.name ?? presetOf(body) ?? ""}
                onChange={(event) => choose(event.target.value)}
              >
                {presets.map((each) => (
                  <option key={each.name} value={each.name}>
                    {each.name}: {each.title}
                  </option>
                ))}
              </select>
            )}
          </Field>
          <div className="fields">
            <Choice
              label="Effort"
              hint={`Algorithms: ${(own ?? recommended).map(({ name }) => name).join(", ") || "none, rounds to nearest"}`}
              error={errorAt("/effort")}
              value={effortOf(body)}
              texts={EFFORT_TEXTS}
              disabled={own !== undefined}
              onChoose={(value) => onChange(withValue(body, "/effort", value === "balanced" ? undefined : value))}
            />
            {Object.entries(CHANGES).map(([name, change]) => (
              <SchemaForm
                key={name}
                name={name}
                label={change.title}
                hint=""
                placeholder={change.empty || ((preset?.config[name] as string[] | undefined) ?? []).join(", ")}
                pointer={`/config/${name}`}
                schema={change}
                root={change}
                value={body.config?.[name]}
                errorAt={errorAt}
                onChange={(value) => onChange(withValue(body, `/config/${name}`, value))}
              />
            ))}
          </div>
          {preset && (
            <button type="button" className="small" onClick={() => onChange(advanced(body, preset))}>
              Advanced settings
            </button>
          )}
        </>
      )}
      {isOwn && (
        <>
          <p className="row spread">
            Custom config with all settings of the engine.
            <button type="button" className="small" onClick={() => choose("w4a16")}>
              Back to presets
            </button>
          </p>
          {schema.data && (
            <SchemaForm
              name="config"
              pointer="/config"
              schema={schema.data}
              root={schema.data}
              value={body.config}
              errorAt={errorAt}
              onChange={(config) =>
                onChange({ ...body, config: (config as Record<string, unknown> | undefined) ?? {} })
              }
            />
          )}
        </>
      )}
      {!body.goal && <Formats {...props} exports={exports} usual={usual} />}
    </fieldset>
  );
}

/** The export formats that hold the scheme, and whether weights go from file to file. */
function Formats({ exports, usual, ...props }: Props & { exports: string[]; usual: string }) {
  const { body, onChange, errorAt } = props;
  const toggle = (name: string) => {
    const now = body.export ?? [];
    const chosen = now.includes(name) ? now.filter((each) => each !== name) : [...now, name];
    onChange(withValue(body, "/export", chosen.length ? chosen : undefined));
  };
  return (
    <>
      <fieldset className="choices" aria-describedby="exports-error">
        <legend>{LABELS.exports}</legend>
        {exports.map((name) => (
          <label key={name}>
            <input type="checkbox" checked={body.export?.includes(name) ?? false} onChange={() => toggle(name)} />{" "}
            {name}
          </label>
        ))}
        <p className={errorAt("/export") ? "error" : "hint"} id="exports-error">
          {errorAt("/export")
            ? `✕ ${errorAt("/export")}`
            : `If you choose none: the format that most programs load for this scheme${usual}.`}
        </p>
      </fieldset>
      <label className="row">
        <input
          type="checkbox"
          checked={body.file2file ?? false}
          aria-describedby="file2file-about"
          onChange={(event) => onChange(withValue(body, "/file2file", event.target.checked || undefined))}
        />{" "}
        File to file
      </label>
      <p id="file2file-about" className={errorAt("/file2file") ? "error" : "hint"}>
        {errorAt("/file2file")
          ? `✕ ${errorAt("/file2file")}`
          : "For data-free schemes: any architecture, without running or evaluating the model."}
      </p>
    </>
  );
}

/** The preset's whole config, with the algorithms that are named or those of the effort. */
function advanced(body: Body, preset: Preset): Body {
  const { effort: _, ...rest } = body;
  const config = configOf(preset, effortOf(body));
  return { ...rest, config: { ...config, algo_config: body.config?.algo_config ?? config.algo_config } };
}

function CalibrationFields(props: Props) {
  const { source = "builtin", sources } = props.body.calibration ?? {};
  return (
    <fieldset>
      <legend>Calibration</legend>
      <TextFields {...props} of="calibration" label="Calibration text" usual="Built-in mix" usualName="builtin" />
      <div className="fields">
        <Value {...props} pointer="/calibration/num_samples" label="Samples" number placeholder="32" />
        <Value
          {...props}
          pointer="/calibration/seq_len"
          label={<Scoped to="Calibration">Sequence length</Scoped>}
          number
          placeholder="512"
        />
        <Value {...props} pointer="/calibration/seed" label="Seed" number placeholder="0" />
        {source !== "builtin" && !sources && (
          <Value
            {...props}
            pointer="/calibration/column"
            label={<Scoped to="Calibration">Text column</Scoped>}
            placeholder={COLUMN_PLACEHOLDER}
          />
        )}
      </div>
    </fieldset>
  );
}

function PublishFields({ body, onChange, errorAt }: Props) {
  const change = (publish: Target | undefined) => onChange({ ...body, publish });
  return (
    <fieldset>
      <legend>Publish</legend>
      <div className="choices field">
        <label>
          <input
            type="checkbox"
            checked={!!body.publish}
            onChange={(event) => change(event.target.checked ? HUB_TARGET : undefined)}
          />{" "}
          Publish when verified
        </label>
      </div>
      {body.publish && (
        <TargetFields
          target={body.publish}
          onChange={change}
          errorAt={(name) =>
            errorAt(`/publish/${name}`) ?? (["repo_id", "to"].includes(name) ? errorAt("/publish") : undefined)
          }
        />
      )}
    </fieldset>
  );
}

function OtherFields(props: Props) {
  const { body, onChange, errorAt } = props;
  const [labels, setLabels] = useState(labelsText(body.labels));
  return (
    <fieldset>
      <legend>Job settings</legend>
      <div className="fields">
        <Value {...props} pointer="/name" label="Name" />
        <Field label="Labels" hint="For example team=search, tier=gold" error={errorAt("/labels")}>
          {(own) => (
            <input
              {...own}
              value={labels}
              onChange={({ target: { value } }) => {
                setLabels(value);
                onChange(withValue(body, "/labels", readLabels(value)));
              }}
            />
          )}
        </Field>
        <Value {...props} pointer="/priority" label="Priority" hint="0 to 9, 9 runs first" number placeholder="5" />
        <Value {...props} pointer="/limits/max_runtime_s" label={`${LABELS.runTimeout} (s)`} number />
        <Value {...props} pointer="/limits/max_pending_s" label={`${LABELS.queueTimeout} (s)`} number />
        <Value {...props} pointer="/max_shard_size" label="Max shard size" placeholder="5GB" />
      </div>
    </fieldset>
  );
}
