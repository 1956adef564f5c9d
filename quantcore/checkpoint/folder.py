"""What a path of a model says: its name, and its GGUF file if it is a single one. No torch."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def model_name(path: Path) -> str:
    """Return the name of the model at ``path``: its last part, but the id for a snapshot in the Hub's cache.

    There the last part is a commit: ``models--ORG--NAME/snapshots/COMMIT``.
    """
    repository = path.parents[1].name if len(path.parents) > 1 and path.parent.name == "snapshots" else ""
    return repository.removeprefix("models--").replace("--", "/") if repository.startswith("models--") else path.name


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file ``path``, or the only one in a folder without config.json; None for other paths.

    Of a model that is split into several files it is the first one.
    """
    if path.suffix == ".gguf" and path.is_file():
        real = path.resolve()  # the path may be a link; one in the Hub's cache leads to a hash without suffix
        return real if path.is_symlink() and real.suffix == ".gguf" else path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if files and set(files) <= set(gguf_parts(files[0])) else None


def gguf_parts(gguf_file: Path) -> list[Path]:
    """Return the paths of all parts of a GGUF file by its name, ``NAME-00001-of-00003.gguf``; else the file alone."""
    found = _PART.fullmatch(gguf_file.name)
    if found is None:
        return [gguf_file]
    name, count = found[1], int(found[3])
    return [gguf_file.with_name(part_name(name, number, count)) for number in range(1, count + 1)]


def part_name(name: str, number: int, count: int) -> str:
    """Return llama.cpp's name of part ``number`` (from 1 on) of a GGUF file that is split."""
    return f"{name}-{number:05}-of-{count:05}.gguf"
