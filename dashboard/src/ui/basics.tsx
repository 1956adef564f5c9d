import { type ReactNode, useEffect, useId, useLayoutEffect, useRef, useState } from "react";
import { Problem } from "../api/client";
import type { Query } from "../api/query";
import { formatAge, formatTime } from "../format";
import { TERMS } from "../terms";

/** The heading of a page. It takes the focus when the page opens, so that a screen reader starts there. */
export function Title({ children, extra }: { children: string; extra?: ReactNode }) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    document.title = `${children} · Bitfoundry`;
  }, [children]);
  useEffect(() => heading.current?.focus({ preventScroll: true }), []);
  return (
    <div className="title">
      <h1 ref={heading} tabIndex={-1}>
        {children}
      </h1>
      {extra}
    </div>
  );
}

export function Loading({ what = "Loading" }: { what?: string }) {
  return (
    <p className="empty" role="status">
      <span className="spinner" aria-hidden="true" /> {what}…
    </p>
  );
}

/** A loading state or an error in place of data; nothing once the data has arrived. */
export function Pending({ query }: { query: Query<unknown> }) {
  if (query.data) return null;
  return query.error ? <Failure error={query.error} retry={query.reload} /> : <Loading />;
}

export function Empty({ children }: { children: ReactNode }) {
  return <div className="empty">{children}</div>;
}

/** An error, its fix, and a button to retry if `retry` is given. */
export function Failure({ error, retry }: { error: Error; retry?: () => void }) {
  const problem = error instanceof Problem ? error : undefined;
  return (
    <div className="notice bad" role="alert">
      <p>
        <strong>{error.message}</strong> {problem?.hint}
      </p>
      {problem && (
        <p className="faint">
          <code>{problem.code}</code> {problem.requestId && <>· request ID {problem.requestId}</>}
        </p>
      )}
      {retry && (
        <button type="button" onClick={retry}>
          Try again
        </button>
      )}
    </div>
  );
}

/** The header of a column of action buttons. */
export function ActionsHead() {
  return (
    <th>
      <span className="hidden">Actions</span>
    </th>
  );
}

/** A relative time that updates itself, with the exact time on hover. */
export function Time({ at }: { at: string | null | undefined }) {
  const [now, setNow] = useState(Date.now);
  const then = at ? Date.parse(at) : Number.NaN;
  const isYoung = Math.abs(now - then) < 120_000;
  useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), isYoung ? 5_000 : 60_000);
    return () => window.clearInterval(timer);
  }, [isYoung]);
  if (!at) return <>–</>;
  return (
    <time dateTime={at} title={formatTime(at)}>
      {formatAge(Math.max(0, now - then) || now - then)}
    </time>
  );
}

export function Bar({ done, total, label }: { done: number; total: number; label: string }) {
  const share = total > 0 ? Math.min(1, done / total) : 0;
  return (
    <div
      className="bar"
      role="progressbar"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.round(100 * share)}
    >
      <div style={{ width: `${100 * share}%` }} />
    </div>
  );
}

export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    window.setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button type="button" className="small" onClick={copy}>
      {copied ? "Copied" : label}
    </button>
  );
}

/** Copies with the clipboard API where it exists (TLS or localhost), otherwise with a hidden text area. */
async function copyText(text: string) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text).catch(() => undefined);
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function Code({ text, label }: { text: string; label: string }) {
  return (
    <figure className="code" aria-label={label}>
      <pre ref={scrollable}>
        <code>{text}</code>
      </pre>
      <CopyButton text={text} />
    </figure>
  );
}

export function Field({
  label,
  hint,
  error,
  children,
}: {
  label: ReactNode;
  hint?: ReactNode;
  error?: string;
  children: (props: { id: string; "aria-describedby"?: string; "aria-invalid"?: true }) => ReactNode;
}) {
  const id = useId();
  const about = hint || error ? `${id}-about` : undefined;
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      {children({ id, "aria-describedby": about, ...(error ? { "aria-invalid": true as const } : {}) })}
      {about && (
        <p id={about} className={error ? "error" : "hint"}>
          {error ? `✕ ${error}` : hint}
        </p>
      )}
    </div>
  );
}

/** A native dialog: it traps the focus, closes with Escape and restores the focus. */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ReactNode }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  // before it leaves the document: a dialog that is not in it restores no focus when it closes
  useLayoutEffect(() => {
    const shown = dialog.current;
    shown?.showModal();
    return () => shown?.close();
  }, []);
  return (
    <dialog
      ref={dialog}
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
    >
      <div className="dialog-head">
        <h2 id={id}>{title}</h2>
        <button type="button" className="small" onClick={onClose} aria-label="Close">
          ✕
        </button>
      </div>
      {children}
    </dialog>
  );
}

/** Asks for confirmation before an action that loses something. */
export function Confirm({
  title,
  action,
  children,
  onConfirm,
  onClose,
}: {
  title: string;
  action: string;
  children: ReactNode;
  onConfirm: () => Promise<void>;
  onClose: () => void;
}) {
  const [error, setError] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const confirm = async () => {
    setBusy(true);
    try {
      await onConfirm();
      onClose();
    } catch (caught) {
      setError(caught as Error);
      setBusy(false);
    }
  };
  return (
    <Dialog title={title} onClose={onClose}>
      {children}
      {error && <Failure error={error} />}
      <div className="actions">
        <button type="button" onClick={onClose}>
          Go back
        </button>
        <button type="button" className="danger" disabled={busy} onClick={confirm}>
          {action}
        </button>
      </div>
    </Dialog>
  );
}

export interface Tab {
  id: string;
  text: string;
}

/** Tabs after the ARIA practices: arrow keys move between them, and one tab is in the tab order. */
export function Tabs({
  tabs,
  shown,
  onShow,
  label,
}: {
  tabs: Tab[];
  shown: string;
  onShow: (id: string) => void;
  label: string;
}) {
  const move = (step: number) => {
    const index = tabs.findIndex((tab) => tab.id === shown);
    const next = tabs[(index + step + tabs.length) % tabs.length];
    if (!next) return;
    onShow(next.id);
    document.getElementById(`tab-${next.id}`)?.focus();
  };
  return (
    <div
      role="tablist"
      aria-label={label}
      className="tabs"
      onKeyDown={(event) => {
        if (event.key === "ArrowRight") move(1);
        if (event.key === "ArrowLeft") move(-1);
      }}
    >
      {tabs.map((tab) => (
        <button
          type="button"
          key={tab.id}
          id={`tab-${tab.id}`}
          role="tab"
          aria-selected={tab.id === shown}
          aria-controls="tab-panel"
          tabIndex={tab.id === shown ? 0 : -1}
          onClick={() => onShow(tab.id)}
        >
          {tab.text}
        </button>
      ))}
    </div>
  );
}

/** What the chosen tab shows. `busy`: a part of it has yet to arrive. */
export function TabPanel({ shown, busy, children }: { shown: string; busy?: boolean; children: ReactNode }) {
  return (
    <div role="tabpanel" id="tab-panel" aria-labelledby={`tab-${shown}`} aria-busy={busy} tabIndex={-1}>
      {children}
    </div>
  );
}

/** A label, with what it means on hover if it is a term of the field. */
export function Term({ children }: { children: string }) {
  const meaning = TERMS[children];
  return meaning ? <abbr title={meaning}>{children}</abbr> : children;
}

export type Fact = [string, ReactNode];

/** A list of names with their values. */
export function Facts({ facts }: { facts: Fact[] }) {
  return (
    <dl className="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>
            <Term>{name}</Term>
          </dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A ref that puts a box into the tab order while its content overflows, so that the keyboard can scroll it. */
export function scrollable(box: HTMLElement | null) {
  if (!box) return;
  const update = () => {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  };
  const observer = new ResizeObserver(update);
  observer.observe(box);
  for (const child of box.children) observer.observe(child);
  return () => observer.disconnect();
}
