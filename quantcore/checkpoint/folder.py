"""What a path of a model says: its name, and its GGUF file if it is a single one. No torch."""

from __future__ import annotations

from pathlib import Path


def model_name(path: Path) -> str:
    """Return the name of the model at ``path``: its last part, but the id for a snapshot in the Hub's cache.

    There the last part is a commit: ``models--ORG--NAME/snapshots/COMMIT``.
    """
    repository = path.parents[1].name if len(path.parents) > 1 and path.parent.name == "snapshots" else ""
    return repository.removeprefix("models--").replace("--", "/") if repository.startswith("models--") else path.name


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file ``path``, or the only one in a folder without config.json; None for other paths."""
    if path.suffix == ".gguf" and path.is_file():
        real = path.resolve()  # the path may be a link; one in the Hub's cache leads to a hash without suffix
        return real if path.is_symlink() and real.suffix == ".gguf" else path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
