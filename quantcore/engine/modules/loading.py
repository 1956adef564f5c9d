"""Reads a model folder (``load``) into a model in memory that gives the same results as the files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.checkpoint.blocks import find_blocks
from quantcore.checkpoint.shared_cache import find_unused
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.containers.dequantize import open_source, read_layer
from quantcore.engine.model.experts import split_experts
from quantcore.engine.model.parameter_names import check_not_rearranged, place_tensors, projection_names
from quantcore.engine.model.regrouping import place_converted
from quantcore.engine.model.skeleton import build_skeleton, float32_names, set_parameter
from quantcore.engine.modules.layers import (
    QuantizedLayer,
    activation_quantizers,
    find_quantizers,
    quantize_caches,
    quantize_layer,
)
from quantcore.engine.runtime.devices import default_device
from quantcore.engine.runtime.ranks import ALONE, Ranks
from quantcore.engine.runtime.sharded import shard
from quantcore.engine.runtime.shards import is_sharded, local_rows, rows_of
from quantcore.errors import ModelError
from quantcore.importing.model import Model, read_model
from quantcore.tensors.affine import QParams
from quantcore.tensors.source import TORCH_DTYPES


class Loaded(NamedTuple):
    """A loaded model. ``config`` describes its quantization; None for a float model."""

    model: PreTrainedModel
    config: Config | None


def load(folder: str | Path, ranks: Ranks = ALONE) -> Loaded:
    """Load the model in ``folder``, in evaluation mode on the CPU.

    Quantized layers are frozen as after ``ModelQuantizer.freeze``, so that it can be evaluated and exported again.

    Several ``ranks`` (``engine.runtime.ranks.joined``) hold it together: each has a shard of every linear layer on its
    device (FSDP2) and reads only that shard. Then the model can be evaluated, not exported. All ranks must call it
    equally often; their inputs may differ.

    Reads all formats that quantcore writes, from any program. Raises ModelError for an unsupported model.
    """
    return load_model(read_model(folder), ranks)


def load_model(checkpoint: Model, ranks: Ranks = ALONE) -> Loaded:
    """Load a model whose headers have been read already."""
    dtype, source = TORCH_DTYPES[checkpoint.headers.main_dtype], open_source(checkpoint)
    model = build_skeleton(checkpoint.headers.config, dtype)
    placed = place_tensors(model, checkpoint.headers.tensors)
    if any(place.rpartition(".")[0] not in dict(model.named_modules()) for place in placed.values()):
        split_experts(model, projection_names(model))  # the files hold experts one by one
    placed, assembled = place_converted(model, checkpoint.headers.tensors, placed)
    check_not_rearranged(model, checkpoint.headers.tensors, placed, assembled)
    stays_float32 = float32_names(model, dtype)
    layers = {} if checkpoint.quantized is None else checkpoint.quantized.layers
    device = torch.device("cpu") if ranks.size == 1 else default_device()
    if ranks.size > 1:
        tied = model.all_tied_weights_keys
        shard(model, ranks, device, lambda place: place in tied or stays_float32(place))
    frozen: dict[str, tuple[Activations, QParams | None]] = {}
    for name, place in placed.items():
        to, before = torch.float32 if stays_float32(place) else dtype, _tensor(model, place)
        rows = rows_of(before) if is_sharded(before) else None
        if (layer := layers.get(name)) is None or checkpoint.quantized is None:
            tensor = source.read(name) if rows is None else source.read_rows(name, rows)
        else:
            codes = read_layer(checkpoint.quantized, layer)
            tensor = codes.weight.dequantize() if rows is None else codes.weight.dequantize()[rows.start : rows.stop]
            frozen[name] = Activations(codes.inputs, codes.outputs), codes.weight.params if ranks.size == 1 else None
        if rows is None:
            set_parameter(model, place, tensor.to(device, to))
        else:
            local_rows(before).copy_(tensor)
    for place, conversion in assembled.items():
        to = torch.float32 if stays_float32(place) else dtype
        set_parameter(model, place, conversion.read(place, source.read).to(device, to))
    for name, buffer in model.named_buffers():
        set_parameter(model, name, buffer.to(device))
    model.tie_weights(recompute_mapping=False)
    _check_whole(model, set(layers) - set(frozen) - _unused(checkpoint))
    for name, (learned, params) in frozen.items():
        _freeze(model.get_submodule(placed[name].rpartition(".")[0]), layers[name], learned, params)
    quantize_caches(model)
    model.config.use_cache = True
    return Loaded(model, None if checkpoint.quantized is None else checkpoint.quantized.config)


def _unused(checkpoint: Model) -> set[str]:
    """Return the quantized weights that no program runs, see ``find_unused``."""
    headers = checkpoint.headers
    layers = (name.removesuffix(".weight") for name in headers.tensors)
    unused = find_unused(layers, headers.config, find_blocks(headers.tensors, headers.config))
    return {f"{name}.weight" for name in unused}


def _check_whole(model: nn.Module, lost: set[str]) -> None:
    """Raise ModelError for a parameter that the files do not fill, or codes that the model has no place for."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty or lost:
        raise ModelError(
            f"The files do not match the architecture in config.json: '{min(empty or lost)}'.",
            code="missing_tensors",
            hint="A shard is missing, or Transformers builds this model differently.",
        )


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Return a parameter or buffer by its full name."""
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), last)
    return tensor


def _freeze(module: nn.Module, layer: LayerPlan, learned: Activations, weight_params: QParams | None) -> None:
    """Turn ``module``, whose weight is already dequantized, into a frozen quantized layer.

    Without ``weight_params`` it cannot be exported, because the scales of its weight are unknown.
    """
    quantizers = (
        activation_quantizers(layer, learned)
        if weight_params is None
        else find_quantizers(module, layer, learned, weight_params)
    )
    quantize_layer(module, layer, quantizers)
    assert isinstance(module, QuantizedLayer)
    module.frozen = True
