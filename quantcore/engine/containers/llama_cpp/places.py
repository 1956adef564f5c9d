"""Where the tensors of a checkpoint lie in the GGUF file that llama.cpp's converter would write of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.engine.containers.llama_cpp.sink import run_converter, stacks_of
from quantcore.export.gguf.converter import check_converter
from quantcore.export.gguf.tensor_names import COMPUTED, Place

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def converted_places(
    model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], model_dir: Path
) -> dict[str, tuple[Place, ...]]:
    """Return the places of each of the ``tensors``; several if the converter divides it.

    Nothing but names and shapes is read. Raises ModelError, ConfigError for a model that it does not convert.
    """
    check_converter(model_config)
    taken = {
        name: TensorLayout(each.dtype, each.shape) for name, each in tensors.items() if not name.endswith(COMPUTED)
    }
    stacks = stacks_of(taken, tensors)
    job = {"name": "", "staged": str(model_dir), "stacks": stacks, "out": None, "names_only": True}
    places: dict[str, list[Place]] = {}
    for stored, described in run_converter(job, model_config, model_dir)["tensors"].items():
        is_stack = len(described["shape"]) > 2
        for part in (part for source in described["sources"] for part in stacks[source]["parts"]):
            expert = _EXPERT.search(part) if is_stack else None
            places.setdefault(part, []).append(Place(stored, None if expert is None else int(expert[1])))
    return {name: tuple(found) for name, found in places.items()}
