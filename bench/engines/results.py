"""The dated results file: it grows row by row, and a later run continues an earlier one."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench.engines.cells import FLOAT, Cell
from bench.engines.table import markdown
from quantcore.engine.runtime.devices import about, default_device

FOLDER = Path(__file__).parents[1] / "results"
MATRIX_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # that matrix products use


class Results:
    """The results in ``file`` and, as a table, in the Markdown file beside it.

    ``settings`` say what was measured: a file with other settings is not continued (ValueError). One file may have
    rows of several machines, but only rows of the same machine are compared.
    """

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.machine = machine()
        self.data: dict[str, Any] = {
            "date": date.today().isoformat(),
            "settings": settings,
            "rows": [],
        }
        if file.exists():
            saved = json.loads(file.read_text("utf-8"))
            if saved["settings"] != settings:
                odd = sorted(
                    key for key in settings | saved["settings"] if settings.get(key) != saved["settings"].get(key)
                )
                raise ValueError(f"{file} was measured with other settings ({', '.join(odd)}); give --results FILE")
            self.data = saved

    def todo(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the ``cells`` without a result, and before them our cells that this machine needs for comparison."""
        done = {_names(row) for row in self.data["rows"] if row["status"] == "ok"}
        measured_here = {
            _names(row) for row in self.data["rows"] if row["status"] == "ok" and row["machine"] == self.machine
        }
        missing = [cell for cell in cells if cell not in done]
        beside = (Cell("ours", cell.scheme, cell.algorithm) for cell in missing if cell.engine != FLOAT)
        return list(dict.fromkeys([*(cell for cell in beside if cell not in measured_here), *missing]))

    def add(self, cell: Cell, row: dict[str, Any]) -> None:
        """Replace an earlier row of the same cell on this machine, and write both files.

        Rows that another run has written to the file meanwhile are kept.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.file.parent):
            if self.file.exists():
                self.data = json.loads(self.file.read_text("utf-8"))
            kept = [other for other in self.data["rows"] if _names(other) != cell or other["machine"] != self.machine]
            named = {"engine": cell.engine, "scheme": cell.scheme, "algorithm": cell.algorithm}
            self.data["rows"] = [*kept, {**named, "machine": self.machine, **row}]
            _replace(self.file, json.dumps(self.data, indent=1) + "\n")
            _replace(self.file.with_suffix(".md"), markdown(self.data))


def _names(row: dict[str, Any]) -> Cell:
    return Cell(row["engine"], row["scheme"], row["algorithm"])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, "utf-8")
    scratch.replace(file)


def machine() -> str:
    """Return a description of the machine; times are comparable where it is the same."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name, flags = re.search(r"model name\s*: (.*)", text), re.search(r"flags\s*: (.*)", text)
    fast = sorted(set(flags.group(1).split()) & set(MATRIX_FLAGS)) if flags else []
    cpu = name.group(1) if name else platform.processor() or platform.machine()
    accelerator = about(default_device()).get("name")
    return f"{cpu} ({', '.join(fast)}), {os.cpu_count()} cores" + (f", {accelerator}" if accelerator else "")
