import { type ReactNode, useState } from "react";
import { Field } from "../../ui/basics";
import { type Body, valueAt, withValue } from "./body";

export interface Props {
  body: Body;
  onChange: (body: Body) => void;
  errorAt: (pointer: string) => string | undefined;
}

interface At extends Props {
  pointer: string;
  label: ReactNode;
  hint?: string;
  placeholder?: string;
}

/** A label that two sections share, with the section for screen readers: accessible names stay unique. */
export function Scoped({ to, children }: { to: string; children: string }) {
  return (
    <>
      <span className="hidden">{to} </span>
      {children}
    </>
  );
}

/** An input for the text or number at a pointer. */
export function Value({
  body,
  onChange,
  errorAt,
  pointer,
  label,
  hint,
  number,
  placeholder,
}: At & { number?: boolean }) {
  const value = valueAt(body, pointer);
  return (
    <Field label={label} hint={hint} error={errorAt(pointer)}>
      {(props) => (
        <input
          {...props}
          type={number ? "number" : "text"}
          placeholder={placeholder}
          value={value === undefined ? "" : String(value)}
          onChange={({ target: { value: next } }) =>
            onChange(withValue(body, pointer, number && next !== "" ? Number(next) : next))
          }
        />
      )}
    </Field>
  );
}

interface Choosing<T extends string> extends Pick<At, "label" | "hint"> {
  error?: string;
  value: string;
  texts: Readonly<Record<T, string>>;
  onChoose: (value: T) => void;
  disabled?: boolean;
}

/** A list to choose one value from, each shown by its text. */
export function Choice<T extends string>({ label, hint, error, texts, onChoose, ...select }: Choosing<T>) {
  return (
    <Field label={label} hint={hint} error={error}>
      {(own) => (
        <select {...own} {...select} onChange={({ target }) => onChoose(target.value as T)}>
          {Object.entries<string>(texts).map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

/** An input for the list of names at a pointer, separated by commas. */
export function Names({ body, onChange, errorAt, pointer, label, hint, placeholder }: At) {
  const [text, setText] = useState(((valueAt(body, pointer) as string[] | undefined) ?? []).join(", "));
  return (
    <Field label={label} hint={hint} error={errorAt(pointer)}>
      {(own) => (
        <input
          {...own}
          placeholder={placeholder}
          value={text}
          onChange={({ target: { value } }) => {
            setText(value);
            const names = value
              .split(",")
              .map((each) => each.trim())
              .filter(Boolean);
            onChange(withValue(body, pointer, names.length ? names : undefined));
          }}
        />
      )}
    </Field>
  );
}
