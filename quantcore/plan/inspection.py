"""Describes a model and its possible exports, from its config, its file headers and a few rows of its weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.experts import routing_of
from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.headers import ModelHeaders, read_folder
from quantcore.checkpoint.layers import is_head, is_linear
from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.errors import ModelError, QuantError
from quantcore.export import formats_for, holds_codes
from quantcore.export.gguf.model import read_gguf
from quantcore.export.mlx import own_settings
from quantcore.hub import download as hub
from quantcore.hub.outline import MAX_CARD_BYTES
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import read_model
from quantcore.plan.planner import make_plan
from quantcore.sandbox.opening import open_file

USUAL_PRESETS = (
    "fp8",
    "fp8_dynamic",
    "int8",
    "int8_dynamic",
    "w4a16",
    "w4a16_sym",
    "mxfp4",
    "nvfp4",
    "nf4",
    "gguf_q4_k",
    "gguf_q8_0",
)
MANY_TENSORS = 5_000  # for larger models only one format of a preset is planned: each takes seconds
_LICENSE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9._-]{1,64})", re.MULTILINE)


@dataclass(frozen=True)
class Inspection:
    """A description of a model.

    ``linear_layers`` are counted by name and shape [out, in]; ``num_parameters`` of a quantized model are those of its
    float model if the format is known. ``grids``: the levels on which the weights lie already, with their shares of the
    weights. Sizes are bytes. ``estimates``: for every usual preset the size of each format
    that can hold it and the peak of memory, or the reason against it.
    """

    model_type: str
    architectures: tuple[str, ...]
    num_blocks: int
    num_parameters: int
    dtypes: dict[str, int]
    linear_layers: tuple[dict[str, Any], ...]
    tied_embeddings: bool
    experts: dict[str, int] | None
    max_position_embeddings: int | None
    vocab_size: int | None
    license: str | None
    num_files: int
    size_bytes: int
    quantization: dict[str, Any] | None
    grids: tuple[dict[str, Any], ...]
    estimates: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def inspect_hub(model_id: str, revision: str = "main", *, token: str | None = None) -> tuple[Inspection, str]:
    """Return (description of a model on the Hub, its commit). Raises the ModelErrors of ``hub.read_headers``."""
    with hub.outline(model_id, revision, token=token) as (folder, sha):
        return inspect(folder, is_whole=False), sha


def inspect(folder: Path, *, is_whole: bool = True) -> Inspection:
    """Describe the model in ``folder``. Raises ModelError.

    Without ``is_whole`` it is an outline, with holes for weights.
    """
    path, gguf_file = folder, find_gguf(folder)
    if gguf_file is None:
        config, stored = read_folder(folder)
    else:
        folder, (config, stored) = gguf_file.parent, read_gguf(gguf_file)
        if any(tensor.dtype in GGUF_BLOCKS for tensor in stored.values()):
            config |= {"quantization_config": {"quant_method": "gguf"}}
    quantization = _quantization(config)
    headers: ModelHeaders | None = None
    warnings: tuple[str, ...] = ()
    if quantization is None or is_whole:  # the tensors may be needed to interpret a quantized file
        try:
            model = with_grids(read_model(path))
            headers, warnings = model.headers, model.headers.warnings
            if quantization is not None and model.quantized is not None:
                quantization["export"] = model.quantized.export
        except ModelError as error:
            if quantization is None:
                raise
            warnings = (error.message,)
    else:
        warnings = ("Its layers are only known after download: there are no estimates yet.",)
    tensors = stored if headers is None else headers.tensors
    num_blocks = len(find_blocks(tensors, config))
    files = {tensor.file for tensor in stored.values()}
    return Inspection(
        model_type=str(config["model_type"]),
        architectures=tuple(map(str, config.get("architectures") or ())),
        num_blocks=num_blocks,
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        dtypes=dict(_by_dtype(stored, tensors)),
        linear_layers=_linear_layers(tensors),
        tied_embeddings=not any(map(is_head, tensors)),
        experts=routing_of(config),
        max_position_embeddings=config.get("max_position_embeddings"),
        vocab_size=ModelConfig(config).vocab_size,
        license=read_license(folder),
        num_files=len(files),
        size_bytes=sum((folder / name).stat().st_size for name in files),
        quantization=quantization,
        grids=() if headers is None else tuple(share.to_dict() for share in headers.grids),
        estimates=() if headers is None else tuple(_estimate(name, headers) for name in USUAL_PRESETS),
        warnings=warnings,
    )


def read_license(folder: Path) -> str | None:
    """Return the license in the front matter of the model's card (``license: apache-2.0``), None if there is none."""
    try:
        with open_file(folder / "README.md") as file:
            text = file.read(MAX_CARD_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    front, end, _ = text.removeprefix("---\n").partition("\n---")
    match = _LICENSE.search(front) if text.startswith("---\n") and end else None
    return match[1] if match else None


def _quantization(config: Mapping[str, Any]) -> dict[str, Any] | None:
    quantization_config = config.get("quantization_config") or own_settings(config)
    if not quantization_config:
        return None
    method = quantization_config.get("quant_method") if isinstance(quantization_config, dict) else None
    return {"quant_method": str(method or "unknown")[:64], "export": None}


def _by_dtype(stored: Mapping[str, TensorHeader], tensors: Mapping[str, TensorHeader]) -> Counter[str]:
    """Return the number of values stored in each dtype; GGUF's blocks count as the values of ``tensors`` in them."""
    counts = Counter[str]()
    for name, tensor in stored.items():
        counts[tensor.dtype] += math.prod(tensors.get(name, tensor).shape)
    return counts


def _linear_layers(tensors: Mapping[str, TensorHeader]) -> tuple[dict[str, Any], ...]:
    counts = Counter(
        (name.removesuffix(".weight").rpartition(".")[2], tensor.shape)
        for name, tensor in tensors.items()
        if is_linear(name, tensor)
    )
    return tuple({"name": name, "shape": list(shape), "count": count} for (name, shape), count in counts.items())


def _estimate(name: str, headers: ModelHeaders) -> dict[str, Any]:
    """Return size and memory of a preset with the usual calibration, for the formats that can hold this model."""
    config = presets.PRESETS[name].config
    sizes: dict[str, int] = {}
    peak, refused = 0, None
    formats = [export for export in formats_for(config) if holds_codes(export)]
    for export in formats if len(headers.tensors) < MANY_TENSORS else formats[:1]:
        try:
            sizes[export], peak = _plan(config, headers, (export,))
        except QuantError as error:
            refused = error
    estimate: dict[str, Any] = {"preset": name, "size_bytes": sizes, "peak_memory_bytes": peak if sizes else None}
    if refused is not None and not sizes:
        estimate["refused"] = {"code": refused.code, "message": refused.message}
    return estimate


def _plan(config: Config, headers: ModelHeaders, exports: Sequence[str]) -> tuple[int, int]:
    usual = CalibrationConfig()
    longest = headers.config.get("max_position_embeddings")
    if isinstance(longest, int):
        usual = usual.model_copy(update={"seq_len": min(usual.seq_len, longest)})
    plan = make_plan(JobSpec(config=config, calibration=usual, export=tuple(exports)), headers)
    return plan.size_after_bytes, plan.peak_memory_bytes
