import { linkOptions, type NavigateOptions, useNavigate } from "@tanstack/react-router";
import { type KeyboardEvent, useEffect, useRef, useState } from "react";
import { get } from "./api/client";
import { useQuery } from "./api/query";
import type { JobPage } from "./api/types";
import { type MenuEntry, matching, menuFor } from "./menu";
import { nameOf } from "./names";
import { useSettled } from "./settled";
import { useSession } from "./sign-in";
import { Dialog } from "./ui/basics";
import { STATES } from "./ui/states";

const NUM_RUNS = 8;
const TYPING_MS = 150;

interface Choice {
  id: string;
  link: NavigateOptions;
  text: string;
  hint: string;
}

const choiceOf = ({ to, text }: MenuEntry, hint: string): Choice => ({ id: `go-${to}`, link: { to }, text, hint });

/** Whether the palette is open. Ctrl-K or ⌘-K opens and closes it, unless another dialog is open. */
export function usePalette() {
  const [isOpen, setIsOpen] = useState(false);
  useEffect(() => {
    const press = (event: globalThis.KeyboardEvent) => {
      if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey) return;
      event.preventDefault();
      setIsOpen((wasOpen) => !wasOpen && !document.querySelector("dialog[open]"));
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
  return { isOpen, open: () => setIsOpen(true), close: () => setIsOpen(false) };
}

/** Goes to a page, a run or a new job by its name: a combobox with a list box after the ARIA practices. */
export function Palette({ onClose }: { onClose: () => void }) {
  const navigate = useNavigate();
  const input = useRef<HTMLInputElement>(null);
  const [text, setText] = useState("");
  const [index, setIndex] = useState(0);
  const { choices, error } = useChoices(text);
  const active = choices[Math.min(index, choices.length - 1)];

  const choose = (choice: Choice | undefined) => {
    if (!choice) return;
    onClose();
    void navigate(choice.link);
  };
  const press = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape")
      onClose(); // at once: a search field would only be emptied
    else if (event.key === "Enter") choose(active);
    else if (step)
      setIndex((Math.min(index, choices.length - 1) + step + choices.length) % Math.max(1, choices.length));
    else return;
    event.preventDefault();
  };
  useEffect(() => input.current?.focus(), []);
  useEffect(() => {
    if (active) document.getElementById(active.id)?.scrollIntoView({ block: "nearest" });
  }, [active]);

  return (
    <Dialog title="Search and commands" onClose={onClose}>
      <input
        type="search"
        className="palette-input"
        role="combobox"
        aria-label="Page, run or command"
        aria-expanded="true"
        aria-controls="palette-choices"
        aria-activedescendant={active?.id}
        placeholder="Page, run or command"
        maxLength={200}
        ref={input}
        value={text}
        onChange={(event) => {
          setText(event.target.value);
          setIndex(0);
        }}
        onKeyDown={press}
      />
      <div role="listbox" id="palette-choices" aria-label="Matches" className="choices-list">
        {choices.map((choice) => (
          // biome-ignore lint/a11y/useKeyWithClickEvents: the keys are pressed in the combobox
          <div
            key={choice.id}
            id={choice.id}
            role="option"
            tabIndex={-1}
            aria-selected={choice === active}
            onClick={() => choose(choice)}
          >
            <span>{choice.text}</span> <span className="sub">{choice.hint}</span>
          </div>
        ))}
      </div>
      <p className="hint" role="status">
        {error && "Runs cannot be searched: the service does not answer. "}
        {choices.length ? "↑ ↓ to choose, Enter to open, Esc to close." : !error && "Nothing matches."}
      </p>
    </Dialog>
  );
}

/** What the text matches: commands and pages, then runs. Without a text, all pages and the newest runs. */
function useChoices(text: string): { choices: Choice[]; error?: Error } {
  const { key } = useSession();
  const asked = useSettled(text.trim(), TYPING_MS);
  const params = { q: asked || null, limit: NUM_RUNS };
  const runs = useQuery(`palette ${asked}`, (signal) => get<JobPage>("/v1/jobs", params, signal));
  const { main, sections, newJob } = menuFor(key.scopes);
  const pages = [
    ...(newJob ? [choiceOf(newJob, "Command")] : []),
    ...main.map((entry) => choiceOf(entry, "Page")),
    ...sections.flatMap((section) => section.pages.map((entry) => choiceOf(entry, section.text))),
  ];
  const found = (runs.data?.data ?? []).map((job) => ({
    id: job.id,
    link: linkOptions({ to: "/jobs/$id", params: { id: job.id } }),
    text: nameOf(job),
    hint: `Run · ${STATES[job.state].text} · ${job.id.slice(-6)}`,
  }));
  return { choices: [...matching(pages, text), ...found], error: runs.error };
}
