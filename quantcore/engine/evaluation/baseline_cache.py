"""Caches measurements of float models, so that a sweep over one model measures it once.

Every entry is a file named by a digest of everything that decides it: the model's bytes, the text or task and its
settings, the versions, the device, and this engine's own source. The folder is BITFOUNDRY_ORIGINALS_DIR (empty: no
cache), by default ``originals`` in Bitfoundry's cache; the service gives each project one of its own. It may be deleted
at any time. The oldest entries are removed
when it is too large.
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
from quantcore.checkpoint.artifact import written_whole
from quantcore.engine.evaluation.provenance import environment
from quantcore.engine.runtime.ranks import ALONE, Ranks

MAX_BYTES = 2 << 30
VARIABLE = "BITFOUNDRY_ORIGINALS_DIR"
T = TypeVar("T")


def folder() -> Path | None:
    """Return the folder of the entries; None if the cache is switched off."""
    setting = os.environ.get(VARIABLE)
    if setting is not None:
        return Path(setting) if setting else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bitfoundry" / "originals"


@dataclass(frozen=True)
class BaselineCache:
    """The cache entries of one model, by its identity (see ``provenance.model_identity``).

    If several ``ranks`` compute a value together, the first one reads and writes the entry; all call ``value``.
    """

    model: str
    ranks: Ranks = ALONE

    def read_states(self, settings: dict[str, Any]) -> torch.Tensor | None:
        """Return the tensor that is cached for these ``settings``; None without an entry."""
        path = self._path(settings, "safetensors")
        with suppress(OSError, SafetensorError, KeyError):
            if path is not None and path.is_file():
                path.touch()
                return load_file(path)["states"]
        return None

    def has_states(self, settings: dict[str, Any]) -> bool:
        """Return whether a tensor is cached for these ``settings``."""
        path = self._path(settings, "safetensors")
        return path is not None and path.is_file()

    def write_states(self, settings: dict[str, Any], states: torch.Tensor) -> None:
        """Cache ``states`` for these ``settings``, unless they are too large for the cache."""
        if states.nbytes <= MAX_BYTES // 4:
            self._write(self._path(settings, "safetensors"), lambda path: save_file({"states": states}, path))

    def states(self, settings: dict[str, Any], compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the cached tensor; without an entry, compute and cache it."""
        states = self.read_states(settings)
        if states is None:
            states = compute()
            self.write_states(settings, states)
        return states

    def value(self, settings: dict[str, Any], compute: Callable[[], T]) -> T:
        """Return the cached JSON data; without an entry, compute and cache them."""
        path = self._path(settings, "json") if self.ranks.is_first else None
        cached: T | None = self.ranks.share(self._read(path))
        if cached is not None:
            return cached
        value = compute()
        self._write(path, lambda scratch: Path(scratch).write_text(json.dumps(value), "utf-8"))
        return value

    @staticmethod
    def _read(path: Path | None) -> Any:
        """Return the JSON data in ``path``; None without a readable file."""
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
        """Write an entry as a whole or not at all. A cache that cannot be written is no reason to fail."""
        if path is None:
            return
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with written_whole(path) as scratch:
                write(scratch)
            _make_room(path.parent)


def _make_room(base: Path) -> None:
    entries = sorted(
        ((path.stat(), path) for path in base.iterdir() if path.is_file()), key=lambda entry: -entry[0].st_mtime_ns
    )
    total = 0
    for status, path in entries:
        total += status.st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


@cache
def _source() -> list[tuple[str, int, int]]:
    """List the files of this engine, because another version may compute something else."""
    root = Path(quantcore.__file__).parent
    files = sorted(root.rglob("*.py"))
    return [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
