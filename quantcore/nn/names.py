"""What the tensors of a model in memory are called in a checkpoint, and which of them are stored at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    revert_weight_conversion,
)

from quantcore.errors import ModelError
from quantcore.nn.layers import QuantizedLayer
from quantcore.nn.tensor_quantizer import TensorQuantizer


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Gives a module's name in memory its name in a checkpoint, by the tables with which Transformers saves models."""
    reverse = _reverse_conversions(model)
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]

    def rename(name: str) -> str:
        return str(apply_renamings(f"{name}.weight", renamings)).removesuffix(".weight")

    return rename


def stored_names(
    model: nn.Module, layers: dict[str, QuantizedLayer]
) -> tuple[list[tuple[str, torch.Tensor]], dict[str, QuantizedLayer]]:
    """The float tensors and the quantized layers of ``model``, by their names in a checkpoint.

    Without the quantizers' buffers, and a tensor that several modules share only once. Raises ModelError for a
    quantized weight that checkpoints keep in another form.
    """
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, TensorQuantizer))
    floats: dict[str, torch.Tensor] = {}
    quantized: dict[str, QuantizedLayer] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if name.startswith(inside) or (tensor.numel() > 0 and key in seen):
            continue
        seen.add(key)
        owner, _, last = name.rpartition(".")
        if last == "weight" and owner in layers:
            quantized[owner] = layers[owner]
        else:
            floats[name] = tensor
    rename = renamer(model)
    _check_form(model, quantized)
    if isinstance(model, PreTrainedModel):
        floats = revert_weight_conversion(model, floats)
    return list(floats.items()), {rename(name): layer for name, layer in quantized.items()}


def _check_form(model: nn.Module, layers: dict[str, QuantizedLayer]) -> None:
    converters = [entry for entry in _reverse_conversions(model) if isinstance(entry, WeightConverter)]
    for name in layers:
        if apply_converters(f"{name}.weight", converters)[1] is not None:
            raise ModelError(
                f"{name} is one layer in memory and stored in another form in checkpoints of this kind of model.",
                code="unsupported_layer",
                hint=f"Exclude it: '*.{name.rpartition('.')[2]}'.",
            )


def _reverse_conversions(model: nn.Module) -> list[WeightRenaming | WeightConverter]:
    """What takes names in memory to names in a checkpoint, in the order in which it is to be applied."""
    if not isinstance(model, PreTrainedModel):
        return []
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not loaded from a checkpoint, so there is no prefix to bring back
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in known if not isinstance(entry, PrefixChange)]
    return [conversion.reverse_transform() for conversion in conversions[::-1]]
