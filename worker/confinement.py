"""The part of the file system that an engine can reach: its job's files and the programs that it runs.

Engines read models that strangers made. Where the kernel has Landlock, the kernel enforces these rules, even on a
compromised engine. Elsewhere the engine itself checks the rules about the job's files
(``quantcore.checkpoint.opening``): no link in a model gets around that check, but code smuggled into the engine would.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import quantcore
from api.settings import Settings
from quantcore.checkpoint.artifact import side_files
from quantcore.checkpoint.opening import VARIABLE, folders_beside
from quantcore.runtime import landlock

logger = logging.getLogger(__name__)

PROGRAM = landlock.__file__
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store", "/gnu/store", "/proc", "/sys",
    # Addresses of name servers, and the drivers' daemons; not all of /run, where containers have their secrets.
    "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", "/run/nvidia-persistenced",
    "/run/nvidia-topologyd", "/run/opengl-driver",
)  # fmt: skip
DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "nvidia*", "kfd", "dri", "dxg", "infiniband",
    "accel",
)  # fmt: skip
CACHES = {
    "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda",
    "MIOPEN_USER_DB_PATH": "miopen", "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
}  # fmt: skip
"""Cache folders of compiled kernels.

Kernels are code: each attempt has its own folders, so that no engine runs what another job left.
"""
ORIGINALS = "BITFOUNDRY_ORIGINALS_DIR"


@dataclass(frozen=True)
class Reach:
    """Rules for an engine, as real paths.

    ``listed`` folders only show the names in them; ``files`` are the job's own files.
    """

    files: tuple[Path, ...]
    listed: tuple[Path, ...]
    read: tuple[Path, ...]
    written: tuple[Path, ...]
    variables: Mapping[str, str]

    def command(self, argv: Iterable[str]) -> list[str]:
        """Return ``argv``, wrapped in Landlock where the kernel has it.

        The rules lie in a file, which the wrapper deletes: thousands of them would be too long for an argument. It is
        a file of this start alone, where no engine can write: the nodes of a job may share the attempt's folder.
        """
        if not landlock.abi():
            return list(argv)
        rules = {"list": self.listed, "read": self.read, "write": self.written}
        with NamedTemporaryFile("w", prefix="bitfoundry-rules-", suffix=".json", delete=False) as file:
            json.dump({kind: [str(path) for path in paths] for kind, paths in rules.items()}, file)
        return [sys.executable, "-I", "-S", PROGRAM, file.name, *argv]

    def environment(self) -> dict[str, str]:
        return {**self.variables, VARIABLE: json.dumps([str(path) for path in self.files])}


def describe(settings: Settings) -> str | None:
    """Return the protection that engines have here, or None if the kernel gives none."""
    if not settings.confine_engine:
        return "switched off (BITFOUNDRY_CONFINE_ENGINE)"
    return f"Landlock, ABI {landlock.abi()}" if landlock.abi() else None


def tell(settings: Settings) -> None:
    """Log the protection that engines have."""
    protection = describe(settings)
    if protection is None:
        logger.warning(
            "this kernel has no Landlock: engines check what they open, and are not held to it; "
            "see docs/concepts/confinement.md"
        )
    else:
        logger.info("engines are confined: %s", protection)


def reach_of(settings: Settings, folder: Path, task: Mapping[str, Any], *, with_hub: bool) -> Reach:
    """Return the rules for the engine of an attempt whose ``folder`` holds its ``task``.

    Makes the folders that the engine needs.
    """
    scratch, originals = folder / "tmp", _originals()
    written = [folder, *_hub_caches()] if with_hub else [folder]
    written += [originals] if originals is not None else []
    for path in (scratch, *written):
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    inputs = [*_model_files(task), *_texts(task)]
    hidden = [settings.data_dir, *([settings.secret_key_file] if settings.secret_key_file else [])]
    listed = _listed(task)
    read: list[Path] = []
    for path in [*inputs, *map(Path, SYSTEM), *_programs(settings)]:
        for shown, is_whole in _around(
            path, [area for area in hidden if path not in inputs or area.is_relative_to(path)]
        ):
            (read if is_whole else listed).append(shown)
    devices = [path for name in DEVICES for path in sorted(Path("/dev").glob(name))]
    variables = {
        "TMPDIR": str(scratch),
        ORIGINALS: "" if originals is None else str(originals),
        "HF_TOKEN_PATH": os.devnull,  # the token comes by its standard input
        **{name: str(scratch / kind) for name, kind in CACHES.items()},
    }
    files = tuple(path.resolve() for path in (*inputs, *written))
    return Reach(files, tuple(listed), tuple(read), (*written, *devices), variables)


def _model_files(task: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the model's folder with the blobs that a snapshot links to; for a GGUF file also its side files.

    The task of a chat also names a result.
    """
    if task.get("artifact_dir") is not None:
        yield Path(task["artifact_dir"])
    if task.get("model_dir") is None:
        return
    model = Path(task["model_dir"])
    yield model
    yield from folders_beside(model)
    if model.is_file():
        yield from (model.parent / name for name in side_files(model.parent))


def _listed(task: Mapping[str, Any]) -> list[Path]:
    """Return the folder of a GGUF file, whose side files are found by their names."""
    model = Path(task.get("model_dir") or "")
    return [model.parent.resolve()] if model.is_file() else []


def _texts(task: Mapping[str, Any]) -> Iterator[Path]:
    for part in ("calibration", "evaluation"):
        for text in (task.get(part) or {}, *(task.get(part) or {}).get("sources", ())):
            yield from (Path(text[name]) for name in ("source", "include_path") if str(text.get(name)).startswith("/"))


def _programs(settings: Settings) -> Iterator[Path]:
    """Yield Python, its packages, and the paths in the engine's command."""
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix))
    yield Path(quantcore.__file__).parents[1]
    yield from (Path(entry) for entry in sys.path if entry and Path(entry) != Path.cwd())
    for variable in ("LD_LIBRARY_PATH", "SSL_CERT_FILE"):
        yield from (Path(entry) for entry in os.environ.get(variable, "").split(os.pathsep) if entry)
    yield from (Path(part) for part in settings.engine_command.split() if part.startswith("/"))


def _hub_caches() -> list[Path]:
    """Return the caches of huggingface_hub and datasets; not their parent folder, which may hold a token."""
    home = Path(os.environ.get("HF_HOME") or Path(_cache(), "huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    return [hub, home / "xet", home / "datasets", home / "modules"]


def _originals() -> Path | None:
    """Return the folder where engines cache results of original models.

    See ``quantcore.evaluation.baseline_cache``.
    """
    folder = os.environ.get(ORIGINALS)
    if folder is not None:
        return Path(folder) if folder else None
    return _cache() / "bitfoundry" / "originals"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def _around(path: Path, hidden: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield the parts of ``path`` without the ``hidden`` paths.

    A part is (path, True), or (path, False) for a folder that contains a hidden path.
    """
    real = path.resolve()
    if real == Path("/") or any(real.is_relative_to(area) for area in hidden):
        return
    if not any(area.is_relative_to(real) for area in hidden):
        yield real, True
        return
    yield real, False
    with suppress(OSError):
        for child in sorted(real.iterdir()):
            yield from _around(child, hidden)
