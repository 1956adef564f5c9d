"""Reads the layers of a checkpoint that is already quantized, by any writer. No torch.

An importer knows its ``quantization_config`` and the names of its tensors; ``quantcore.importing.model`` builds a model
from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quantcore.checkpoint.layout import Stack, TensorHeader
from quantcore.config.quantization import QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.errors import ModelError
from quantcore.sandbox.opening import open_file

if TYPE_CHECKING:
    import torch

    from quantcore.config.layer_plan import LayerPlan

READ_BY_IMPORTERS = re.compile(r"\.quant_state\.bitsandbytes__|\.g_idx$|\.weight_shape$")
"""Names of the small tensors whose bytes describe how layers are quantized (see ``StoredFiles.read_bytes``)."""

SCALE_TYPES = {"F32": ScaleType.float32, "F16": ScaleType.float16, "BF16": ScaleType.bfloat16}


@dataclass(frozen=True)
class StoredFiles:
    """The tensors of a folder by name, and the dtype of its floats as in safetensors (``BF16``).

    ``stacks``: weights that lie in a stack in a float checkpoint of this kind of model, transposed.
    """

    folder: Path
    tensors: Mapping[str, TensorHeader]
    model_dtype: str
    stacks: Mapping[str, Stack] = field(default_factory=dict)

    def modules_with(self, part: str) -> list[str]:
        """Return the names of the modules that have a tensor called ``part``."""
        ending = f".{part}"
        return [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if the checkpoint does not have it."""
        if name not in self.tensors:
            raise ModelError(
                f"The quantized checkpoint has no tensor '{name}'.",
                code="missing_tensors",
                hint="A shard is missing, or the quantization_config in config.json does not match the files.",
            )
        return self.tensors[name].shape

    def read_bytes(self, name: str) -> bytes:
        """Return the bytes of a small tensor."""
        self.shape(name)
        header = self.tensors[name]
        with open_file(self.folder / header.file) as file:
            file.seek(header.begin)
            return file.read(header.num_bytes)

    def with_scale(self, spec: QuantizationSpec, name: str) -> QuantizationSpec:
        """Return ``spec`` with the number type in which the scales called ``name`` are stored."""
        self.shape(name)
        dtype = self.tensors[name].dtype
        return replace(spec, scale_type=ScaleType.float if dtype == self.model_dtype else SCALE_TYPES[dtype])


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer: its weight's shape [out, in], and its config."""

    shape: tuple[int, ...]
    config: QuantizationConfig


@runtime_checkable
class Importer(Protocol):
    """An exporter that can also read its own format."""

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Return True if a ``quantization_config`` describes this format."""

    def read_layers(self, config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        """Return the quantized layers by name. Raises ModelError for a variant of the format that is not supported."""


MAX_REPETITIONS = 3


def matches(pattern: str, name: str) -> bool:
    """Match a regular expression from a checkpoint, which may be hostile, against the beginning of ``name``.

    Raises ModelError for one that could run forever: with a repeated group, or more than three repetitions.
    """
    repetitions = re.findall(r"[*+{]", pattern)
    if len(repetitions) > MAX_REPETITIONS or re.search(r"\)[*+?{]", pattern):
        raise not_held(f"its pattern {pattern!r} has too many repetitions to be evaluated safely")
    return re.match(pattern, name) is not None


def not_held(what: str, hint: str = "Provide the float model it was made from.") -> ModelError:
    """Return the error for a variant of a known format that is not supported."""
    return ModelError(f"This quantized checkpoint cannot be read: {what}.", code="unsupported_quantization", hint=hint)


def finite(layer: LayerPlan, part: str, numbers: torch.Tensor, what: str = "scale") -> torch.Tensor:
    """Return ``numbers``, which are the stored ``part`` of a layer.

    Raises ModelError ``nonfinite_weights``, in which each of them is called ``what``.
    """
    if not numbers.isfinite().all():
        raise ModelError(
            f"'{layer.name}.{part}' has a {what} that is NaN or infinite.",
            code="nonfinite_weights",
            hint="The checkpoint is damaged. Provide the float model that it was made from.",
        )
    return numbers
