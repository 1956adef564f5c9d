"""Maps the tensors of a model in memory to their names in a checkpoint, and selects those that are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

from quantcore.checkpoint.experts import find_routers
from quantcore.config.quantization import ONLY_WHEN_ASKED
from quantcore.engine.modules.layers import QuantizedLayer, kind_of, quantized_layers
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.errors import ModelError


@dataclass(frozen=True)
class Stored:
    """The contents of a checkpoint of a model in memory, by their names there.

    ``floats`` are the tensors that are not quantized, ``kept`` the layers and routers among them.
    """

    floats: dict[str, torch.Tensor]
    layers: dict[str, QuantizedLayer]
    kept: tuple[str, ...]


def find_stored(model: nn.Module) -> Stored:
    """Return the tensors and layers of ``model`` without the quantizers' buffers. Shared tensors appear once.

    Raises ModelError for a quantized weight that checkpoints store in another form.
    """
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, TensorQuantizer))
    layers = dict(quantized_layers(model))
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
    _check_form(model, quantized)
    rename = _renamer(model)
    if isinstance(model, PreTrainedModel):
        floats = revert_weight_conversion(model, floats)
    kept = {rename(name) for name, module in model.named_modules() if _is_kept(module)}
    stored = {rename(name): layer for name, layer in quantized.items()}
    return Stored(floats, stored, tuple(sorted(kept | _routers(floats, stored))))


def _is_kept(module: nn.Module) -> bool:
    return not isinstance(module, QuantizedLayer) and kind_of(module) not in (None, *ONLY_WHEN_ASKED)


def _routers(floats: dict[str, torch.Tensor], layers: dict[str, QuantizedLayer]) -> set[str]:
    """Return the routers, which are layers in a checkpoint but not in Transformers."""
    shapes = {name: tuple(tensor.shape) for name, tensor in floats.items()}
    shapes |= {f"{name}.weight": layer.plan.shape for name, layer in layers.items()}
    return {name for name in find_routers(shapes) if f"{name}.weight" in floats}


def _renamer(model: nn.Module) -> Callable[[str], str]:
    """Return a function that maps a module's name to its name in a checkpoint, by the tables of Transformers."""
    renamings = [entry for entry in _reverse_conversions(model) if isinstance(entry, WeightRenaming)]
    return lambda name: str(apply_renamings(f"{name}.weight", renamings)).removesuffix(".weight")


def _check_form(model: nn.Module, layers: dict[str, QuantizedLayer]) -> None:
    converters = [entry for entry in _reverse_conversions(model) if isinstance(entry, WeightConverter)]
    for name in layers:
        if apply_converters(f"{name}.weight", converters)[1] is not None:
            raise ModelError(
                f"{name} is a single layer in memory but stored differently in checkpoints of such models.",
                code="unsupported_layer",
                hint=f"Exclude it by name: '{name}'.",
            )


def _reverse_conversions(model: nn.Module) -> list[WeightRenaming | WeightConverter]:
    """Return the conversions from names in memory to names in a checkpoint, in the order in which to apply them."""
    if not isinstance(model, PreTrainedModel):
        return []
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not loaded from a checkpoint, so there is no prefix to bring back
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    return [conversion.reverse_transform() for conversion in conversions[::-1]]
