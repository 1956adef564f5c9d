"""How a run of the command line goes on after a stop: where its progress is, and what continues it. No torch."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantcore.config.task import Task
from quantcore.events import Emit, Event, Saved


def default_resume_dir(task: Task) -> Path:
    """Return the hidden folder beside the output that keeps the progress; a search for a goal has its own."""
    kind = "resume" if task.goal is None else "auto"
    return task.output_dir.with_name(f".{task.output_dir.name}.{kind}")


@dataclass
class Progress:
    """What is kept of the run of a ``command`` line: ``folder`` is None until the run begins.

    ``is_default``: the folder is that of ``default_resume_dir``; ``saved`` is the last savepoint.
    """

    command: Sequence[str]
    folder: Path | None = None
    is_default: bool = False
    saved: Saved | None = None

    def kept_of(self, task: Task) -> Task:
        """Return ``task`` with a folder for its progress, by default the one of ``default_resume_dir``."""
        default = default_resume_dir(task)
        self.folder = task.resume_dir or default
        self.is_default = self.folder == default
        return task.model_copy(update={"resume_dir": self.folder})

    def noting(self, emit: Emit) -> Emit:
        """Return an ``emit`` that notes the savepoints."""

        def note(event: Event) -> None:
            self.saved = event if isinstance(event, Saved) else self.saved
            emit(event)

        return note

    def after_a_stop(self, *, is_interrupted: bool) -> str:
        """Say what is left of a run that did not end in success; '' for an error that left nothing.

        A folder that nothing can continue is removed.
        """
        begin = "Interrupted. " if is_interrupted else ""
        if self.folder is None or not any(self.folder.glob("*.json")):
            if self.folder is not None and self.is_default:
                shutil.rmtree(self.folder, ignore_errors=True)
            return begin and f"{begin}Nothing was saved yet, and nothing is left."
        blocks = (
            f"{self.saved.next_block} of {self.saved.num_blocks} blocks are saved"
            if self.saved
            else "The progress is saved"
        )
        return (
            f"{begin}{blocks} in {self.folder}. The same command continues there:\n  {shlex.join(self.command)}\n"
            "Delete the folder if you do not want to continue."
        )
