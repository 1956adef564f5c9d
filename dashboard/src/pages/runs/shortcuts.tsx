// Keyboard shortcuts of the list of runs.
import { useNavigate } from "@tanstack/react-router";
import { useEffect, useState } from "react";
import type { Job } from "../../api/types";
import { Dialog } from "../../ui/basics";
import { compareLink, MAX_NAMED } from "../compare/address";

const SHORTCUTS: [string, string][] = [
  ["j k", "Next or previous run"],
  ["Enter", "Open run"],
  ["x", "Select run"],
  ["c", "Compare selected runs"],
  ["/", "Search"],
  ["n", "New job"],
  ["Ctrl K", "Search and commands, on every page"],
  ["?", "Show keyboard shortcuts"],
];

const isTyping = (target: EventTarget | null) =>
  target instanceof HTMLElement && (/^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable);

export function useShortcuts(jobs: Job[], toggle: (id: string) => void, selected: string[], mayWrite: boolean) {
  const navigate = useNavigate();
  const [cursorId, setCursorId] = useState<string | null>(null);
  const [helpShown, setHelpShown] = useState(false);

  useEffect(() => {
    const move = (step: number) => {
      const index = jobs.findIndex((job) => job.id === cursorId);
      const next = jobs[Math.max(0, Math.min(jobs.length - 1, index < 0 ? 0 : index + step))];
      if (!next) return;
      setCursorId(next.id);
      document.getElementById(`row-${next.id}`)?.scrollIntoView({ block: "nearest" });
    };
    const press = (event: KeyboardEvent) => {
      const isBox = event.target instanceof HTMLInputElement && event.target.type === "checkbox";
      if ((isTyping(event.target) && !isBox) || event.metaKey || event.ctrlKey || event.altKey) return;
      if (helpShown || document.querySelector("dialog[open]")) return;
      const onControl = event.target instanceof HTMLElement && event.target.closest("a, button, input, select");
      if (event.key === "j") move(1);
      else if (event.key === "k") move(-1);
      else if (event.key === "x" && cursorId) toggle(cursorId);
      else if (event.key === "Enter" && cursorId && !onControl)
        void navigate({ to: "/jobs/$id", params: { id: cursorId } });
      else if (event.key === "c" && selected.length > 1 && selected.length <= MAX_NAMED)
        void navigate(compareLink(selected));
      else if (event.key === "/") document.getElementById("search")?.focus();
      else if (event.key === "n" && mayWrite) void navigate({ to: "/jobs/new" });
      else if (event.key === "?") setHelpShown(true);
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [jobs, cursorId, selected, helpShown, toggle, mayWrite, navigate]);

  return { cursorId, helpShown, closeHelp: () => setHelpShown(false) };
}

export function ShortcutHelp({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <table>
        <tbody>
          {SHORTCUTS.map(([key, what]) => (
            <tr key={key}>
              <th scope="row">
                <kbd>{key}</kbd>
              </th>
              <td>{what}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Dialog>
  );
}
