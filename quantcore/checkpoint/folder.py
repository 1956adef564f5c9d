"""Finds the GGUF file of a folder whose model is a single GGUF file. No torch."""

from __future__ import annotations

from pathlib import Path


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file ``path``, or the only one in a folder without config.json; None for other paths."""
    if path.suffix == ".gguf" and path.is_file():
        real = path.resolve()  # the path may be a link; one in the Hub's cache leads to a hash without suffix
        return real if path.is_symlink() and real.suffix == ".gguf" else path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
