"""Asks llama.cpp's converter, in a process of its own, how it would lay out a model. No torch here.

The names and shapes of the tensors in its file, and what they are made from, need no weights and no tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantcore.checkpoint.harmless import harmless_config
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.errors import ModelError
from quantcore.export.gguf import converter
from quantcore.export.gguf.tensor_names import COMPUTED, Place

MODULE = "quantcore.engine.containers.llama_cpp.driver"
_AFTER_HEADS = ".linear_attn.out_proj."
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class ConvertedNames:
    """The tensors of the converter's file. ``places``: where each tensor of the checkpoint lies; several if divided.

    ``shapes`` are those of the tensors in the file, ``fields`` some of its metadata.
    """

    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, tuple[Place, ...]]
    fields: Mapping[str, Any]


def converted_names(model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> ConvertedNames:
    """Return the names that the converter gives the ``tensors`` of a model with this config.json.

    Raises ModelError, ConfigError for a model that it does not convert, and if it is not installed.
    """
    converter.check_converter(model_config)
    taken = {
        name: TensorLayout(each.dtype, each.shape) for name, each in tensors.items() if not name.endswith(COMPUTED)
    }
    stacks = stacks_of(taken, tensors)
    answer = json.loads(_ask(json.dumps([dict(model_config), stacks])))
    places: dict[str, list[Place]] = {}
    for stored, described in answer["tensors"].items():
        is_stack = len(described["shape"]) > 2
        for part in (part for source in described["sources"] for part in stacks[source]["parts"]):
            expert = _EXPERT.search(part) if is_stack else None
            moved = tuple(answer["fields"]["moved_heads"] or ()) if _AFTER_HEADS in part else ()
            place = Place(stored, None if expert is None else int(expert[1]), moved_heads=moved)
            places.setdefault(part, []).append(place)
    shapes = {name: tuple(described["shape"]) for name, described in answer["tensors"].items()}
    return ConvertedNames(shapes, {name: tuple(found) for name, found in places.items()}, answer["fields"])


@lru_cache(maxsize=4)
def _ask(question: str) -> str:
    """Return the answer to [config.json, stacks] as JSON: a plan is made several times in a job."""
    model_config, stacks = json.loads(question)
    with tempfile.TemporaryDirectory(prefix="bitfoundry-gguf-") as empty:
        staged = str(Path(empty, "nothing"))
        job = {"name": "", "staged": staged, "stacks": stacks, "out": None, "names_only": True}
        return json.dumps(run_converter(job, model_config, Path(empty)))


def run_converter(job: Mapping[str, Any], model_config: Mapping[str, Any], files: Path) -> dict[str, Any]:
    """Return the result of a job of ``driver``, in a process of its own. Raises ModelError with the converter's reason.

    The model has this config.json, which is written into the folder ``files`` with its tokenizer.
    """
    config, _ = harmless_config(model_config)
    (files / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="bitfoundry-gguf-") as scratch:
        name = re.sub(r"[^\w.-]+", "-", str(job["name"]).rpartition("/")[2]).strip("-.") or "model"
        folder = Path(scratch, "models", name)
        folder.parent.mkdir()
        folder.symlink_to(files)  # its name becomes metadata: basename, size and finetune
        job_file = Path(scratch) / "job.json"
        job_file.write_text(json.dumps({**job, "model": str(folder)}), encoding="utf-8")
        path = os.pathsep.join(map(str, [*converter.paths(), Path(__file__).parents[3]]))
        command = [sys.executable, "-m", MODULE, str(job_file)]
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        answer = job_file.with_suffix(".result")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if not result or "error" in result:
        reason = result.get("error") or (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ModelError(
            f"llama.cpp's converter cannot convert this model: {reason}",
            code="unsupported_architecture",
            hint="Remove gguf from the formats. Models that lack a file or a field of their published form are"
            " refused, too.",
        )
    return result


def stacks_of(layouts: Mapping[str, TensorLayout], tensors: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Return the float checkpoint's tensors, by name: their shapes, and the parts that lie in each."""
    stacks: dict[str, Any] = {}
    for name, layout in layouts.items():
        header = tensors.get(name)
        if header is None or header.stack is None:
            shape = layout.shape if header is None else header.shape
            stacks[name] = {"shape": shape, "parts": {name: {}}, "stacked": False}
            continue
        stack, element = header.stack, header.num_bytes // max(1, math.prod(header.shape))
        entry = stacks.setdefault(stack.name, {"shape": stack.shape, "parts": {}, "stacked": True})
        entry["parts"][name] = {
            "begin": (header.begin - stack.begin) // element,
            "num_rows": header.shape[0] * (header.end - header.begin) // header.num_bytes,
            "first": header.rows[0] if header.rows else 0,
            "transposed": header.transposed,
        }
    return stacks
