import { useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { DatasetPage, HubToken, List, Preset } from "../../api/types";
import { Field } from "../../ui/basics";
import { UploadDialog } from "../dataset-upload";
import { type Body, labelsText, presetOf, readLabels, withPreset, withValue } from "./body";
import { Inspect } from "./inspect";
import type { Schema } from "./schema";
import { SchemaForm } from "./schema-form";

interface Props {
  body: Body;
  onChange: (body: Body) => void;
  errorAt: (pointer: string) => string | undefined;
}

export function JobForm(props: Props) {
  const presets = useQuery("presets", (signal) => get<List<Preset>>("/v1/presets", {}, signal));
  return (
    <>
      <ModelFields {...props} />
      <SchemeFields {...props} presets={presets.data?.data ?? []} />
      <CalibrationFields {...props} />
      <OtherFields {...props} />
    </>
  );
}

/** A text or number at a pointer. */
function Value({ body, onChange, errorAt, pointer, label, hint, number, placeholder }: Props & { pointer: string; label: string; hint?: string; number?: boolean; placeholder?: string }) {
  const value = pointer.split("/").slice(1).reduce<unknown>((at, name) => (at as Record<string, unknown> | undefined)?.[name], body);
  return (
    <Field label={label} hint={hint} error={errorAt(pointer)}>
      {(props) => (
        <input
          {...props}
          type={number ? "number" : "text"}
          placeholder={placeholder}
          value={value === undefined ? "" : String(value)}
          onChange={({ target: { value: next } }) => onChange(withValue(body, pointer, number && next !== "" ? Number(next) : next))}
        />
      )}
    </Field>
  );
}

function ModelFields(props: Props) {
  const { body, onChange, errorAt } = props;
  const isHub = body.model.id !== undefined;
  const tokens = useQuery(isHub ? "hub-tokens" : null, (signal) => get<List<HubToken>>("/v1/hub-tokens", {}, signal));
  return (
    <fieldset>
      <legend>Model</legend>
      <div className="choices field">
        <label>
          <input type="radio" name="where" checked={!isHub} onChange={() => onChange({ ...body, model: { path: "" } })} /> A folder of the service
        </label>
        <label>
          <input type="radio" name="where" checked={isHub} onChange={() => onChange({ ...body, model: { id: "" } })} /> On the Hugging Face Hub
        </label>
      </div>
      {isHub ? (
        <div className="fields">
          <Field label="Id" error={errorAt("/model/id") ?? errorAt("/model")}>
            {(own) => (
              <input {...own} placeholder="org/name" value={body.model.id} onChange={(event) => onChange({ ...body, model: { ...body.model, id: event.target.value.trim() } })} />
            )}
          </Field>
          <Value {...props} pointer="/model/revision" label="Revision" placeholder="main" />
          <Field label="Token" hint="For a private model." error={errorAt("/model/hub_token")}>
            {(own) => (
              <select {...own} value={body.model.hub_token ?? ""} onChange={(event) => onChange(withValue(body, "/model/hub_token", event.target.value))}>
                <option value="">none</option>
                {tokens.data?.data.map((token) => (
                  <option key={token.name}>{token.name}</option>
                ))}
              </select>
            )}
          </Field>
        </div>
      ) : (
        <Field label="Folder" error={errorAt("/model/path") ?? errorAt("/model")} hint="A path on the service's machine, below the folders that it may read.">
          {(own) => (
            <input {...own} placeholder="/models/SmolLM2-135M-Instruct" value={body.model.path ?? ""} onChange={(event) => onChange({ ...body, model: { path: event.target.value.trim() } })} />
          )}
        </Field>
      )}
      <Inspect model={body.model} />
    </fieldset>
  );
}

function SchemeFields(props: Props & { presets: Preset[] }) {
  const { body, onChange, presets, errorAt } = props;
  const preset = presets.find((each) => each.name === presetOf(body) || each.aliases.includes(presetOf(body) ?? ""));
  const isOwn = presetOf(body) === null;
  const schema = useQuery(isOwn ? "config-schema" : null, (signal) => get<Schema>("/v1/config-schema", {}, signal));
  const exports = preset?.exports ?? [...new Set(presets.flatMap((each) => each.exports))].sort();
  const choose = (name: string) => {
    const next = presets.find((each) => each.name === name);
    if (next) onChange(withPreset(body, next));
  };
  const toggle = (name: string) => {
    const now = body.export ?? [];
    onChange({ ...body, export: now.includes(name) ? now.filter((each) => each !== name) : [...now, name] });
  };
  return (
    <fieldset>
      <legend>Scheme</legend>
      {!isOwn && (
        <>
          <Field label="Preset" hint={preset?.title} error={errorAt("/config/preset") ?? errorAt("/config")}>
            {(own) => (
              <select {...own} value={preset?.name ?? presetOf(body) ?? ""} onChange={(event) => choose(event.target.value)}>
                {presets.map((each) => (
                  <option key={each.name} value={each.name}>
                    {each.name}: {each.title}
                  </option>
                ))}
              </select>
            )}
          </Field>
          <div className="fields">
            <Value {...props} pointer="/config/group_size" label="Group size" number placeholder="as the preset" />
            <Value {...props} pointer="/config/kv_cache" label="KV cache" placeholder="not quantized" />
            <Excluded {...props} preset={preset} />
          </div>
          {preset && (
            <button className="small" onClick={() => onChange({ ...body, config: preset.config })}>
              Change every detail
            </button>
          )}
        </>
      )}
      {isOwn && (
        <>
          <p className="row spread">
            A config of your own, in the engine's names.
            <button className="small" onClick={() => choose("w4a16")}>
              Back to presets
            </button>
          </p>
          {schema.data && (
            <SchemaForm name="config" pointer="/config" schema={schema.data} root={schema.data} value={body.config} errorAt={errorAt} onChange={(config) => onChange({ ...body, config: (config as Record<string, unknown> | undefined) ?? {} })} />
          )}
        </>
      )}
      <fieldset className="choices" aria-describedby="exports-error">
        <legend>Formats to write</legend>
        {exports.map((name) => (
          <label key={name}>
            <input type="checkbox" checked={body.export?.includes(name) ?? false} onChange={() => toggle(name)} /> {name}
          </label>
        ))}
        {errorAt("/export") && (
          <p className="error" id="exports-error">
            ✕ {errorAt("/export")}
          </p>
        )}
      </fieldset>
    </fieldset>
  );
}

function Excluded({ body, onChange, errorAt, preset }: Props & { preset: Preset | undefined }) {
  const [text, setText] = useState(((body.config.exclude as string[] | undefined) ?? []).join(", "));
  const known = (preset?.config.exclude as string[] | undefined)?.join(", ");
  return (
    <Field label="Exclude" error={errorAt("/config/exclude")}>
      {(own) => (
        <input
          {...own}
          placeholder={known}
          value={text}
          onChange={({ target: { value } }) => {
            setText(value);
            const names = value.split(",").map((each) => each.trim()).filter(Boolean);
            onChange(withValue(body, "/config/exclude", names.length ? names : undefined));
          }}
        />
      )}
    </Field>
  );
}

function CalibrationFields(props: Props) {
  const { body, onChange, errorAt } = props;
  const datasets = useQuery("datasets for jobs", (signal) => get<DatasetPage>("/v1/datasets", { limit: 100 }, signal));
  const [uploading, setUploading] = useState(false);
  const source = body.calibration?.source ?? "builtin";
  const known = ["builtin", ...(datasets.data?.data.map((each) => each.id) ?? [])];
  const isOther = !known.includes(source);
  return (
    <fieldset>
      <legend>Calibration text</legend>
      <div className="row field">
        <Field label="From" error={errorAt("/calibration/source") ?? errorAt("/calibration")}>
          {(own) => (
            <select {...own} value={isOther ? "other" : source} onChange={(event) => onChange(withValue(body, "/calibration/source", event.target.value === "builtin" ? undefined : event.target.value === "other" ? "/" : event.target.value))}>
              <option value="builtin">Built-in prose</option>
              {datasets.data?.data.map((each) => (
                <option key={each.id} value={each.id}>
                  {each.name} ({each.statistics.num_rows} rows)
                </option>
              ))}
              <option value="other">A file of the service, or the Hub …</option>
            </select>
          )}
        </Field>
        <button onClick={() => setUploading(true)}>Upload a dataset</button>
      </div>
      {isOther && (
        <div className="fields">
          <Value {...props} pointer="/calibration/source" label="Path or name on the Hub" />
          <Value {...props} pointer="/calibration/config" label="Config of the dataset" />
          <Value {...props} pointer="/calibration/split" label="Split" />
        </div>
      )}
      <div className="fields">
        <Value {...props} pointer="/calibration/num_samples" label="Samples" number placeholder="32" />
        <Value {...props} pointer="/calibration/seq_len" label="Tokens of a sample" number placeholder="512" />
        <Value {...props} pointer="/calibration/seed" label="Seed" number placeholder="0" />
        {source !== "builtin" && <Value {...props} pointer="/calibration/column" label="Column" placeholder="text, else messages" />}
      </div>
      {uploading && (
        <UploadDialog
          onClose={() => setUploading(false)}
          onDone={(dataset) => {
            datasets.reload();
            onChange(withValue(body, "/calibration/source", dataset.id));
          }}
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
      <legend>Name and limits</legend>
      <div className="fields">
        <Value {...props} pointer="/name" label="Name" />
        <Field label="Labels" hint="team=search, tier=gold" error={errorAt("/labels")}>
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
        <Value {...props} pointer="/priority" label="Priority" hint="0 to 9, 9 goes first" number placeholder="5" />
        <Value {...props} pointer="/limits/max_runtime_s" label="Run at most, s" number />
        <Value {...props} pointer="/limits/max_pending_s" label="Wait at most, s" number />
        <Value {...props} pointer="/max_shard_size" label="Largest file" placeholder="5GB" />
      </div>
    </fieldset>
  );
}
