"""What is known of originals from jobs before: a sweep over one model measures the float model once.

Every entry is a file named by a digest of all that decides it: the model's bytes, the text or task and its settings,
the versions, the device, and this engine's own source. The folder is BITFOUNDRY_ORIGINALS_DIR (empty: nothing is kept),
by default ``originals`` in Bitfoundry's cache; it may be deleted at any time. The oldest entries go when it is large.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import quantcore
from quantcore.evaluation.provenance import environment
from quantcore.runtime.ranks import ALONE, Ranks

MAX_BYTES = 2 << 30
VARIABLE = "BITFOUNDRY_ORIGINALS_DIR"
T = TypeVar("T")


def folder() -> Path | None:
    """Where entries are kept, None if they are not."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bitfoundry" / "originals"


@dataclass(frozen=True)
class Originals:
    """The entries of one model (see ``provenance.model_identity``).

    Of ``ranks`` that compute a value together the first one reads and keeps it; all call ``value``.
    """

    model: str
    ranks: Ranks = ALONE

    def known_states(self, settings: dict[str, Any]) -> torch.Tensor | None:
        """The tensor that was kept for these ``settings``."""
        path = self._path(settings, "safetensors")
        with suppress(OSError, SafetensorError, KeyError):
            if path is not None and path.is_file():
                path.touch()
                return load_file(path)["states"]
        return None

    def has_states(self, settings: dict[str, Any]) -> bool:
        path = self._path(settings, "safetensors")
        return path is not None and path.is_file()

    def keep_states(self, settings: dict[str, Any], states: torch.Tensor) -> None:
        if states.nbytes <= MAX_BYTES // 4:
            self._write(self._path(settings, "safetensors"), lambda path: save_file({"states": states}, path))

    def states(self, settings: dict[str, Any], compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor that was kept for these ``settings``; else what ``compute`` gives, which is kept."""
        known = self.known_states(settings)
        if known is None:
            known = compute()
            self.keep_states(settings, known)
        return known

    def value(self, settings: dict[str, Any], compute: Callable[[], T]) -> T:
        """The JSON data that was kept for these ``settings``; else what ``compute`` gives, which is kept."""
        path = self._path(settings, "json") if self.ranks.is_first else None
        known: T | None = self.ranks.share(self._read(path))
        if known is not None:
            return known
        found = compute()
        self._write(path, lambda scratch: Path(scratch).write_text(json.dumps(found), "utf-8"))
        return found

    @staticmethod
    def _read(path: Path | None) -> Any:
        """The JSON data in ``path``, None without it."""
        with suppress(OSError, ValueError):
            if path is not None and path.is_file():
                path.touch()
                return json.loads(path.read_text("utf-8"))
        return None

    def _path(self, settings: dict[str, Any], kind: str) -> Path | None:
        base = folder()
        if base is None:
            return None
        parts = [self.model, settings, environment(), torch.get_num_threads(), _source()]
        return base / f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}.{kind}"

    @staticmethod
    def _write(path: Path | None, write: Callable[[Path], object]) -> None:
        """Whole or not at all. A cache that cannot be written is none; that is no reason to fail."""
        if path is None:
            return
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                write(scratch)
                scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)
            _make_room(path.parent)


def _make_room(base: Path) -> None:
    entries = sorted(((path.stat(), path) for path in base.iterdir()), key=lambda one: -one[0].st_mtime_ns)
    total = 0
    for status, path in entries:
        total += status.st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


@cache
def _source() -> list[tuple[str, int, int]]:
    """This engine's files: another one may compute otherwise."""
    root = Path(quantcore.__file__).parent
    files = sorted(root.rglob("*.py"))
    return [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
