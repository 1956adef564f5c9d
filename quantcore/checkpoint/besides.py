"""Files in a model's folder that are not the model, and that other programs may take for it: each is named.

An adapter changes what Transformers loads, so it is merged on request (``checkpoint.adapter``), never left out in
silence. Weights that no index names, and Python
code, are left out with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantcore.errors import ModelError
from quantcore.sandbox.opening import read_bytes

ADAPTER = "adapter_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODE = "auto_map"
CONFIG = "config.json"
MAX_NAMED = 5
_WITH_CODE = (CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def refuse_adapter(names: Mapping[str, Any] | set[str]) -> None:
    """Raise ModelError if one of the files ``names`` in a model's folder is a PEFT adapter."""
    if ADAPTER in names:
        raise ModelError(
            f"The folder has an adapter ({ADAPTER}): Transformers would apply it to its base model, but Bitfoundry "
            "would ignore it.",
            code="adapter_not_merged",
            hint="To merge it while the base model is quantized: bitfoundry quantize BASE_MODEL --adapter FOLDER, each "
            "in a folder of its own. To quantize the model without it, remove the adapter's files.",
        )


def refuse_folder_of_models(folder: Path) -> None:
    """Raise ModelError ``no_config`` for a folder that only contains other models' folders; it names some of them."""
    if (folder / CONFIG).exists():
        return
    if names := sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}")):
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise ModelError(
            f"{CONFIG} is missing from {folder}, which contains folders of models.",
            code="no_config",
            hint=f"Give the path of one of them: {', '.join(names[:MAX_NAMED])}{more}.",
        )


def weights_without_index(names: list[str]) -> list[str]:
    """Return those of the safetensors files ``names`` that are the model where no index names them.

    Adapters and Mistral's own format have names of their own; a tensor that two other files hold is refused later.
    """
    return [name for name in names if not name.startswith(("adapter_", "consolidated"))] or names


def check_strays(folder: Path, weights: set[str]) -> None:
    """Raise ModelError if a single file and an index name two sets of weights: programs disagree which to load."""
    if SINGLE not in weights and (folder / SINGLE).exists() and (folder / INDEX).exists():
        raise ModelError(
            f"The folder has two sets of weights: {SINGLE}, which Transformers loads, and the files of {INDEX}, which"
            " vLLM loads.",
            code="two_models",
            hint=f"Remove one of them from the folder: {SINGLE}, or the index with its files.",
        )


def warn_of_besides(folder: Path, model_type: str, weights: set[str]) -> Iterator[str]:
    """Yield a warning for weight files other than ``weights``, and one for Python code that configs name."""
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in weights)
    if strays:
        yield (
            f"The folder has other weights that do not belong to the model and are not read: {', '.join(strays[:5])}."
        )
    code = sorted({name for file in _WITH_CODE for name in _code_of(folder / file)})
    if code:
        yield (
            f"The model brings Python code ({CODE} names {', '.join(code[:5])}), which is neither run nor copied. "
            f"The result's config.json names no code if Transformers has its own class for '{model_type}'; "
            "otherwise, or for a custom tokenizer, copy the code into the result's folder."
        )


def _code_of(file: Path) -> Iterator[str]:
    """Yield the Python files that a config's ``auto_map`` names."""
    try:
        named = json.loads(read_bytes(file)).get(CODE) or {}
        entries = named.values() if isinstance(named, dict) else [named]
    except (OSError, ValueError, AttributeError, RecursionError, ModelError):
        return  # its own reader says what is wrong with it
    for entry in entries:
        for path in entry if isinstance(entry, list) else [entry]:
            if isinstance(path, str) and "--" not in path and "." in path:
                yield f"{path.rpartition('.')[0][:80]}.py"
