import { type ReactNode, useState } from "react";
import { Field } from "../../ui/basics";
import { type Control, controlOf, resolve, type Schema, unwrap } from "./schema";

interface Props {
  name: string;
  /** In place of the name as the label, of the first sentence of the description as the hint, and of the default. */
  label?: ReactNode;
  hint?: string;
  placeholder?: string;
  pointer: string;
  schema: Schema;
  root: Schema;
  value: unknown;
  onChange: (value: unknown) => void;
  errorAt: (pointer: string) => string | undefined;
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);
export const plain = (text: string | undefined) => text?.replaceAll("``", "");
export const firstLine = (text: string | undefined) => plain(text?.split(/\n|(?<=\.)(?<!et al\.) /)[0]);
const escapePointer = (part: string) => part.replaceAll("~", "~0").replaceAll("/", "~1");

/** A form for a value that a JSON Schema describes. The service validates it; this component only renders it. */
export function SchemaForm(props: Props): ReactNode {
  const { schema } = unwrap(props.schema, props.root);
  const control = controlOf(schema, props.root);
  if (control.kind === "const") return null;
  if (control.kind === "object") return <ObjectForm {...props} control={control} />;
  if (control.kind === "map") return <MapForm {...props} control={control} />;
  if (control.kind === "variants") return null; // the algorithms: ChainFields shows them
  return <ScalarField {...props} schema={schema} control={control} />;
}

type Of<K extends Control["kind"]> = Props & { control: Extract<Control, { kind: K }> };

/** Fields are rendered only if the object exists: specs can nest without end. */
function ObjectForm({ name, pointer, root, value, onChange, errorAt, control, schema }: Of<"object">) {
  const error = errorAt(pointer);
  if (!isObject(value)) {
    return (
      <div className="field">
        <strong>{name}</strong>{" "}
        <button type="button" className="small" onClick={() => onChange({})} aria-label={`Add ${name}`}>
          Add
        </button>
        {error && <p className="error">✕ {error}</p>}
      </div>
    );
  }
  const set = (member: string, next: unknown) => {
    const { [member]: _, ...rest } = value;
    onChange(next === undefined ? rest : { ...value, [member]: next });
  };
  const hint = firstLine(resolve(schema, root).description);
  return (
    <details className="field whole" open>
      <summary>
        <strong>{name}</strong>
      </summary>
      {hint && <p className="hint">{hint}</p>}
      {error && <p className="error">✕ {error}</p>}
      <fieldset>
        <legend className="hidden">{name}</legend>
        <div className="fields">
          {Object.entries(control.properties).map(([member, memberSchema]) => (
            <SchemaForm
              key={member}
              name={member}
              pointer={`${pointer}/${escapePointer(member)}`}
              schema={memberSchema}
              root={root}
              value={value[member]}
              onChange={(next) => set(member, next)}
              errorAt={errorAt}
            />
          ))}
        </div>
        <button type="button" className="small" onClick={() => onChange(undefined)}>
          Remove {name}
        </button>
      </fieldset>
    </details>
  );
}

function MapForm({ name, pointer, root, value, onChange, errorAt, control }: Of<"map">) {
  const [key, setKey] = useState("");
  const present = isObject(value) ? value : {};
  const entries = Object.entries(present);
  const drop = (gone: string) => onChange(Object.fromEntries(entries.filter(([each]) => each !== gone)));
  return (
    <details className="field whole" open={entries.length > 0}>
      <summary>
        <strong>{name}</strong> <span className="faint">{entries.length || "none"}</span>
      </summary>
      {entries.map(([each, member]) => (
        <div key={each}>
          <SchemaForm
            name={each}
            pointer={`${pointer}/${escapePointer(each)}`}
            schema={control.values}
            root={root}
            value={member}
            onChange={(next) => (next === undefined ? drop(each) : onChange({ ...present, [each]: next }))}
            errorAt={errorAt}
          />
        </div>
      ))}
      <div className="row">
        <input
          aria-label={`New entry in ${name}`}
          placeholder="*.v_proj"
          value={key}
          onChange={(event) => setKey(event.target.value)}
        />
        <button
          type="button"
          className="small"
          disabled={!key || key in present}
          onClick={() => {
            onChange({ ...present, [key]: {} });
            setKey("");
          }}
        >
          Add
        </button>
      </div>
    </details>
  );
}

function ScalarField({ control, schema, value, onChange, ...props }: Props & { control: Control }) {
  const defaultText = schema.default === undefined || schema.default === null ? "" : String(schema.default);
  const placeholder = props.placeholder ?? defaultText;
  return (
    <Field
      label={props.label ?? props.name}
      hint={props.hint ?? firstLine(schema.description)}
      error={props.errorAt(props.pointer)}
    >
      {(own) => {
        if (control.kind === "choice" || control.kind === "switch") {
          const options = control.kind === "choice" ? control.options : ["true", "false"];
          return (
            <select
              {...own}
              value={value === undefined || value === null ? "" : String(value)}
              onChange={({ target: { value: next } }) =>
                onChange(next === "" ? undefined : control.kind === "switch" ? next === "true" : next)
              }
            >
              <option value="">{defaultText ? `default (${defaultText})` : "default"}</option>
              {options.map((option) => (
                <option key={option}>{option}</option>
              ))}
            </select>
          );
        }
        if (control.kind === "number") {
          return (
            <input
              {...own}
              type="number"
              step={control.whole ? 1 : "any"}
              placeholder={placeholder}
              value={typeof value === "number" ? value : ""}
              onChange={(event) => onChange(event.target.value === "" ? undefined : Number(event.target.value))}
            />
          );
        }
        if (control.kind === "text") {
          return (
            <input
              {...own}
              placeholder={placeholder}
              value={typeof value === "string" ? value : ""}
              onChange={(event) => onChange(event.target.value || undefined)}
            />
          );
        }
        return (
          <TypedInput
            {...own}
            placeholder={props.placeholder}
            isList={control.kind === "texts"}
            value={value}
            onChange={onChange}
          />
        );
      }}
    </Field>
  );
}

/** An input for comma-separated texts, or for any JSON. The text stays as it is typed. */
function TypedInput({
  isList,
  placeholder = isList ? "a, b" : "JSON",
  value,
  onChange,
  ...props
}: {
  isList: boolean;
  value: unknown;
  onChange: (value: unknown) => void;
  placeholder?: string;
  id: string;
}) {
  const write = (shown: unknown) =>
    shown === undefined || shown === null ? "" : isList ? (shown as string[]).join(", ") : JSON.stringify(shown);
  const read = (text: string): unknown => {
    if (!text.trim()) return undefined;
    if (isList)
      return text
        .split(",")
        .map((part) => part.trim())
        .filter(Boolean);
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  };
  const [text, setText] = useState(write(value));
  const shown = JSON.stringify(read(text)) === JSON.stringify(value) ? text : write(value);
  return (
    <input
      {...props}
      placeholder={placeholder}
      value={shown}
      onChange={(event) => {
        setText(event.target.value);
        onChange(read(event.target.value));
      }}
    />
  );
}
