"""Runs a page of the documentation as a reader would: every block that can run, top to bottom, in one shell.

Blocks of ``sh`` and ``console`` (its lines behind ``$``) run in one bash, blocks of ``python`` in one namespace. A
block that cannot run in a test stands behind a line ``<!-- not run: the reason -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("sh", "console", "python")
_PART = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$|^#+ (?P<heading>[^\n]+)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its text, the heading above it, and the reason why it is not run ('' if it is)."""

    language: str
    text: str
    heading: str
    reason: str

    @property
    def runs(self) -> bool:
        return self.language in LANGUAGES and not self.reason

    @property
    def script(self) -> str:
        """The text that a reader types. In a console these are the lines behind ``$`` and their continuations."""
        if self.language != "console":
            return self.text
        return "".join(re.findall(r"^\$ ((?:[^\n]*\\\n)*[^\n]*\n)", self.text, flags=re.MULTILINE))

    @property
    def shown(self) -> str:
        """The output of a console on the page."""
        return re.sub(r"^\$ (?:[^\n]*\\\n)*[^\n]*\n", "", self.text, flags=re.MULTILINE)


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of ``docs/{page}`` in order."""
    blocks, heading = [], ""
    for part in _PART.finditer((ROOT / page if page == "README.md" else DOCS / page).read_text("utf-8")):
        if part["heading"]:
            heading = part["heading"]
        else:
            blocks.append(Block(part["language"], part["text"], heading, part["reason"] or ""))
    return blocks


@dataclass
class Reading:
    """The results of a page: its shell's output block by block, its Python's names, its shell's variables."""

    names: dict[str, Any]
    outputs: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return "".join(self.outputs)


class Shell:
    """A bash process that stops at the first command that fails."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"PATH": path, "NO_PROXY": "127.0.0.1", "COLUMNS": "200", **environment},
        )  # fmt: skip
        self._type("set -euo pipefail\n")

    def _type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def run(self, script: str) -> str:
        """Run the script and return its output. Raises AssertionError with the output if a command fails."""
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(script)
            file.flush()
            end = f"--- the end of {file.name}\n"
            self._type(f". {file.name} < /dev/null; printf %s {end!r}; echo\n".replace("\\n", ""))
            lines = []
            for line in self._process.stdout:
                if line.endswith(end):
                    return "".join([*lines, line.removesuffix(end)])
                lines.append(line)
        raise AssertionError(f"It failed:\n{script}\nIt printed:\n{''.join(lines)}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def read_page(
    page: str, folder: Path, *, names: Mapping[str, Any] | None = None,
    at: Mapping[str, Callable[[], object]] | None = None, show: Sequence[str] = (), **environment: str,
) -> Reading:  # fmt: skip
    """Run the blocks of a page in ``folder``, with ``names`` in its Python and ``environment`` in its shell.

    ``at`` maps headings to functions that are called there: to start a worker, say. ``show`` names variables of the
    shell to return at the end.
    """
    reading = Reading({**(names or {})})
    waiting = dict(at or {})
    shell = Shell(folder, environment)
    try:
        with chdir(folder):
            for block in blocks_of(page):
                if (happens := waiting.pop(block.heading, None)) is not None:
                    happens()
                if not block.runs:
                    continue
                if block.language == "python":
                    exec(compile(block.script, f"{page}, {block.heading}", "exec"), reading.names)
                else:
                    reading.outputs.append(shell.run(block.script))
            reading.variables.update({name: shell.run(f'printf %s "${name}"').rstrip("\n") for name in show})
    finally:
        shell.close()
    assert not waiting, f"{page} has no block under {list(waiting)}"
    return reading
