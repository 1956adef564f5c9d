"""A folder that holds a model may hold it as a single GGUF file. No torch."""

from __future__ import annotations

from pathlib import Path


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or that is all there is of a model in the folder ``path``; None for others."""
    if path.suffix == ".gguf" and path.is_file():
        real = path.resolve()  # a person may name a link to anywhere; one in the Hub's cache leads to a hash
        return real if path.is_symlink() and real.suffix == ".gguf" else path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
