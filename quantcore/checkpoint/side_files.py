"""The files of a model other than its weights and config.json: which they are, and how they are copied and compared."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path

from quantcore.checkpoint.folder import find_gguf
from quantcore.errors import ModelError
from quantcore.sandbox.opening import MAX_SIDE_FILE_BYTES, open_file, read_bytes

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
            raise _unreadable(f"its path '{path[:100]}' is not the name of a folder next to it")
        names = side_files(folder / path, ("config.json", "*.safetensors")) if (folder / path).is_dir() else []
        if kind.rpartition(".")[2] in WITH_WEIGHTS and not any(name.endswith(".safetensors") for name in names):
            raise _unreadable(f"the weights of the step '{path}' ({kind}) do not exist as safetensors")
        found += [f"{path}/{name}" for name in names]
    return found


def _unreadable(why: str) -> ModelError:
    return ModelError(
        f"{MODULES}, with which sentence-transformers loads this model, cannot be carried over: {why}.",
        code="unreadable_modules",
        hint=f"Provide all model files, or remove {MODULES} to export a plain Transformers model.",
    )


def copy_side_files(model_dir: Path, folder: Path, patterns: tuple[str, ...] = SIDE_FILES) -> list[str]:
    """Copy tokenizer, chat template, generation config and license, or other ``patterns``; return the names copied.

    ``model_dir`` is the model's folder or GGUF file. Raises ModelError as ``opening.open_file``.
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
