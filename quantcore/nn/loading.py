"""``load``: a model folder as a model in memory that computes what the files say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from quantcore.blocks.experts import split_experts
from quantcore.blocks.names import place_tensors, projection_names
from quantcore.blocks.skeleton import build_skeleton, float32_names, set_parameter
from quantcore.calibration.ranges import Activations
from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.config import Config
from quantcore.dequantizing import open_source, read_layer
from quantcore.errors import ModelError
from quantcore.layer import LayerPlan
from quantcore.nn.layers import QuantizedLayer, find_quantizers, quantize_layer
from quantcore.qtensor import QLayer
from quantcore.reading import read_model


class Loaded(NamedTuple):
    """``config`` says how ``model`` is quantized; None for a float model."""

    model: PreTrainedModel
    config: Config | None


def load(folder: str | Path) -> Loaded:
    """The model in ``folder``, in evaluation mode on the CPU; of a quantized one the layers are frozen as after
    ``ModelQuantizer.freeze``, so that it can be evaluated and exported again.

    Any format that quantcore writes is read, whoever wrote it. Raises ModelError that says what is not known.
    """
    found = read_model(folder)
    dtype, source = TORCH_DTYPES[found.headers.main_dtype], open_source(found)
    model = build_skeleton(found.headers.config, dtype)
    placed = place_tensors(model, found.headers.tensors)
    if any(place.rpartition(".")[0] not in dict(model.named_modules()) for place in placed.values()):
        split_experts(model, projection_names(model))  # the files hold experts one by one
    stays_float32 = float32_names(model, dtype)
    layers = {} if found.quantized is None else found.quantized.layers
    codes: dict[str, QLayer] = {}
    for name, place in placed.items():
        if (layer := layers.get(name)) is None or found.quantized is None:
            tensor = source.read(name)
        else:
            codes[name] = read_layer(found.quantized, layer)
            tensor = codes[name].weight.dequantize()
        set_parameter(model, place, tensor.to(torch.float32 if stays_float32(place) else dtype))
    model.tie_weights()
    _check_whole(model, set(layers) - set(codes))
    for name, quantized in codes.items():
        _freeze(model.get_submodule(placed[name].rpartition(".")[0]), layers[name], quantized)
    model.config.use_cache = True
    return Loaded(model, None if found.quantized is None else found.quantized.config)


def _check_whole(model: nn.Module, lost: set[str]) -> None:
    """Raises ModelError for a parameter that the files do not fill, or codes that the model has no place for."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty or lost:
        raise ModelError(
            f"The files do not fit the architecture in config.json: '{min(empty or lost)}'.",
            code="missing_tensors",
            hint="A shard is missing, or Transformers builds this model in another way.",
        )


def _freeze(module: nn.Module, layer: LayerPlan, quantized: QLayer) -> None:
    """Make ``module``, whose weight is what the codes stand for, a quantized layer."""
    learned = Activations(quantized.inputs, quantized.outputs)
    quantize_layer(module, layer, find_quantizers(module, layer, learned, quantized.weight.params))
    assert isinstance(module, QuantizedLayer)
    module.frozen = True
