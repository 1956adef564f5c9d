"""Builds the artifact folder under a hidden name, seals it with a manifest, and moves it into place as a whole."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.opening import MAX_SIDE_FILE_BYTES, open_file, read_bytes
from quantcore.errors import ConfigError, GateError, ModelError

if TYPE_CHECKING:
    import torch

MANIFEST = "MANIFEST.json"
LICENSES = ("LICENSE*",)
SIDE_FILES = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.spm", "*.tiktoken", "*.jinja", "chat_template.json", "*processor*.json", "normalizer.json",
    "modules.json", "*sentence*.json", *LICENSES,
)  # fmt: skip
"""Files that are copied with a model beside its weights and config.json, byte for byte.

They are of the tokenizer, of processors of images and sound, and of sentence-transformers (see ``module_files``)."""
MODULES = "modules.json"
TEMPLATES = "additional_chat_templates"
WITH_WEIGHTS = ("Dense", "LayerNorm", "CNN", "LSTM", "WeightedLayerPooling")
"""Modules of sentence-transformers that have weights of their own."""


@contextmanager
def building(output_dir: Path, resume_dir: Path | None = None) -> Iterator[Path]:
    """Yield a folder to build in, which is renamed to ``output_dir`` at the end, or removed after a failure.

    With a ``resume_dir`` it is a part of that and is kept after a failure; at the end all of ``resume_dir`` is removed.
    After a GateError the folder moves to ``rejected_dir``. Raises ConfigError ``output_exists`` if ``output_dir`` is
    not empty.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ConfigError(
            f"The output folder {output_dir} is not empty.",
            code="output_exists",
            hint="Give a new folder, or empty this one: nothing is overwritten.",
            field="/output_dir",
        )
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    if resume_dir is None:
        kept = partial = output_dir.with_name(f".{output_dir.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
    else:
        kept, partial = resume_dir, resume_dir / "artifact"
    partial.mkdir(parents=True, exist_ok=True)
    is_done = False
    try:
        yield partial
        if sys.platform == "win32" and output_dir.exists():
            output_dir.rmdir()  # it is empty, and Windows puts no folder in the place of another
        partial.replace(output_dir)
        sync(output_dir.parent)
        is_done = True
    except GateError:
        partial.replace(rejected_dir(output_dir))
        sync(output_dir.parent)
        is_done = True
        raise
    finally:
        if is_done or resume_dir is None:
            shutil.rmtree(kept, ignore_errors=True)


def rejected_dir(output_dir: Path) -> Path:
    """Return the path for an artifact that missed a limit: NAME.rejected, NAME.rejected-2 ... beside ``output_dir``."""
    names = chain([f"{output_dir.name}.rejected"], (f"{output_dir.name}.rejected-{number}" for number in count(2)))
    return next(path for name in names if not (path := output_dir.with_name(name)).exists())


def side_files(folder: Path, patterns: tuple[str, ...] = SIDE_FILES) -> list[str]:
    """List the files in ``folder`` that match ``patterns``; links count as files, wherever they lead."""
    files = [path for path in folder.iterdir() if path.is_symlink() or not path.is_dir()]
    return sorted(path.name for path in files if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns))


def inner_files(folder: Path) -> list[str]:
    """List the files in folders of a model: chat templates beside the main one, and those of ``module_files``."""
    templates = side_files(folder / TEMPLATES, ("*.jinja",)) if (folder / TEMPLATES).is_dir() else []
    return [*(f"{TEMPLATES}/{name}" for name in templates), *module_files(folder)]


def module_files(folder: Path) -> list[str]:
    """List the files of the steps that sentence-transformers runs behind the model, such as ``1_Pooling/config.json``.

    ``modules.json`` names their folders; a model without it has none. Raises ModelError ``unreadable_modules`` for
    another content, or if the weights of a step are not in safetensors.
    """
    if not (folder / MODULES).exists():
        return []
    try:
        modules = [(str(module["path"]), str(module["type"])) for module in json.loads(read_bytes(folder / MODULES))]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable("it is not a list of modules with a path and a type") from error
    found = []
    for path, kind in modules:
        if not path:
            continue  # the model itself
        if Path(path).name != path or path.startswith("."):
            raise _unreadable(f"its path '{path[:100]}' is not the name of a folder beside it")
        names = side_files(folder / path, ("config.json", "*.safetensors")) if (folder / path).is_dir() else []
        if kind.rpartition(".")[2] in WITH_WEIGHTS and not any(name.endswith(".safetensors") for name in names):
            raise _unreadable(f"the weights of the step '{path}' ({kind}) are not there as safetensors")
        found += [f"{path}/{name}" for name in names]
    return found


def _unreadable(why: str) -> ModelError:
    return ModelError(
        f"{MODULES}, with which sentence-transformers loads this model, cannot be carried over: {why}.",
        code="unreadable_modules",
        hint=f"Give all files of the model, or remove {MODULES}: then the result is a plain Transformers model.",
    )


def copy_side_files(model_dir: Path, folder: Path, patterns: tuple[str, ...] = SIDE_FILES) -> list[str]:
    """Copy tokenizer, chat template, generation config and license, or other ``patterns``; return the names copied.

    A GGUF file without tokenizer files beside it has its own tokenizer unpacked. Raises ModelError as
    ``opening.open_file``.
    """
    gguf_file = find_gguf(model_dir)
    if gguf_file is not None:
        model_dir = gguf_file.parent
    names = side_files(model_dir, patterns) + (inner_files(model_dir) if patterns == SIDE_FILES else [])
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        with (
            open_file(model_dir / name, root=model_dir, max_bytes=MAX_SIDE_FILE_BYTES) as source,
            (folder / name).open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
    if gguf_file is not None and patterns == SIDE_FILES and "tokenizer.json" not in names:
        from quantcore.checkpoint.tokenizer import load_tokenizer

        load_tokenizer(gguf_file).save_pretrained(folder)
    return names


def differing_side_files(model_dir: Path, folder: Path) -> list[str]:
    """Return the files of ``copy_side_files`` that differ between ``folder`` and ``model_dir``."""
    if find_gguf(model_dir) is not None:
        return []  # unpacked, not copied
    return [
        name
        for name in (*side_files(model_dir), *inner_files(model_dir))
        if not (folder / name).is_file() or read_bytes(folder / name) != read_bytes(model_dir / name, root=model_dir)
    ]


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")


def seal(folder: Path) -> str:
    """Write MANIFEST.json (sorted path, size, sha256 of every other file) and sync all; return its own sha256."""
    manifest = folder / MANIFEST
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    entries = [
        {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    ]
    write_json(manifest, {"format": 1, "files": sorted(entries, key=lambda entry: str(entry["path"]))})
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)
    return sha256(manifest)


def sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write the content of ``path``, a file or a folder, to the disk before this returns.

    Windows can only sync files, and only writable ones.
    """
    if sys.platform == "win32":
        if path.is_file() and os.access(path, os.W_OK):
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
