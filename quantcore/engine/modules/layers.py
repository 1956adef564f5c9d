"""Quantized layers: a module keeps its parameters, hooks and ``forward``, and computes with quantized numbers.

A quantized module gets a class that is derived at run time from the module's own class. Its ``weight`` and ``bias``
return the dequantized values; its input and output pass through quantizers. So there is no class for a dtype, a scheme
or a kind of layer, and a subclass uses its weight as before. The layout of weights is in ``formats.weight_layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.blockwise.results import Solved
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.model.cache_taps import tap_caches
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.formats.weight_layout import canonical, stored
from quantcore.tensors.affine import QParams
from quantcore.tensors.qtensor import quantize_weight

CLASSES: dict[str, type[nn.Module]] = {
    "Linear": nn.Linear,
    "Conv1d": nn.Conv1d,
    "Conv2d": nn.Conv2d,
    "ConvTranspose2d": nn.ConvTranspose2d,
    "Conv1D": Conv1D,
    "Embedding": nn.Embedding,
    "EmbeddingBag": nn.EmbeddingBag,
}


class QuantizedLayer(nn.Module):
    """Adds quantizers to the class of a layer. A quantizer is None where the layer's config has no spec."""

    plan: LayerPlan
    frozen: bool
    input_quantizer: TensorQuantizer | None
    weight_quantizer: TensorQuantizer | None
    bias_quantizer: TensorQuantizer | None
    output_quantizer: TensorQuantizer | None

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.input_quantizer is not None:
            input = self.input_quantizer(input)
        output: torch.Tensor = super().forward(input, *args, **kwargs)
        if self.output_quantizer is None or self.plan.is_cached:  # see ``quantize_caches``
            return output
        rounded: torch.Tensor = self.output_quantizer(output)
        return rounded

    @property
    def weight(self) -> torch.Tensor | None:
        """The dequantized weight, as the layer stores it. Once frozen, the parameter itself has these values."""
        weight = self._parameters["weight"]
        if weight is None or self.frozen or self.weight_quantizer is None:
            return weight
        return stored(self.weight_quantizer(self.canonical_weight()), self.plan.kind, num_groups(self))

    @property
    def bias(self) -> torch.Tensor | None:
        """The dequantized bias."""
        bias = self._parameters.get("bias")
        return bias if bias is None or self.frozen or self.bias_quantizer is None else self.bias_quantizer(bias)

    def canonical_weight(self) -> torch.Tensor:
        """Return the parameter as [out, in / groups, *kernel]: float, or dequantized once frozen."""
        weight = self._parameters["weight"]
        assert weight is not None
        return canonical(weight, self.plan.kind, num_groups(self))

    def freeze(self, done: set[int]) -> None:
        """Replace the float weight and bias by their dequantized values, in the model's dtype.

        ``done`` holds the ids of shared parameters that another layer has replaced already.
        """
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        if weight is not None and self.weight_quantizer is not None and id(weight) not in done:
            restored = self.weight_quantizer.through_codes(self.canonical_weight().detach())
            weight.data = stored(restored, self.plan.kind, num_groups(self))
        if bias is not None and self.bias_quantizer is not None and id(bias) not in done:
            bias.data = self.bias_quantizer.through_codes(bias.detach())
        done |= {id(weight), id(bias)}
        self.frozen = True

    def extra_repr(self) -> str:
        scheme = "" if self.plan.config.weight is None else f", {self.plan.scheme}"
        return f"{super().extra_repr()}{scheme}, {'frozen' if self.frozen else 'not frozen'}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Copy and pickle through the base class: the derived class cannot be looked up by its name."""
        return _without_state, (type(self).__mro__[2],), self.__dict__


_DERIVED: dict[type[nn.Module], type[QuantizedLayer]] = {}


def quantized_class(base: type[nn.Module]) -> type[QuantizedLayer]:
    """Return ``base`` with quantizers; always the same class for the same ``base``."""
    if base not in _DERIVED:
        _DERIVED[base] = type(f"Quantized{base.__name__}", (QuantizedLayer, base), {})
    return _DERIVED[base]


def _without_state(base: type[nn.Module]) -> QuantizedLayer:
    kind = quantized_class(base)
    return kind.__new__(kind)


def kind_of(module: nn.Module) -> str | None:
    """Return the name of the layer class of ``module``; None if its weight cannot be quantized."""
    return next((kind for kind, parent in CLASSES.items() if isinstance(module, parent)), None)


def num_groups(module: nn.Module) -> int:
    """Return the number of groups of a convolution; 1 for any other layer."""
    groups: int = getattr(module, "groups", 1)
    return groups


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLayer]]:
    """Yield the quantized layers of ``model`` with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLayer))


def find_quantizers(
    module: nn.Module,
    plan: LayerPlan,
    learned: Activations,
    weight_params: QParams | None = None,
    global_scale: torch.Tensor | None = None,
) -> dict[str, TensorQuantizer | None]:
    """Make the quantizers that ``quantize_layer`` needs.

    Ranges of weight and bias come from their values, unless ``weight_params`` are given. The scales of the weight are
    below ``global_scale`` if there is one.
    """
    config = plan.config
    weight = canonical(module.get_parameter("weight").detach(), plan.kind, num_groups(module))
    bias = getattr(module, "bias", None)
    return activation_quantizers(plan, learned) | {
        "weight_quantizer": (
            None
            if config.weight is None
            else TensorQuantizer.of_weight(weight, config.weight, global_scale)
            if weight_params is None
            else TensorQuantizer(config.weight, weight_params, is_weight=True)
        ),
        "bias_quantizer": (
            None if config.bias is None or bias is None else TensorQuantizer.of_weight(bias.detach(), config.bias)
        ),
    }


def as_solved(module: nn.Module, plan: LayerPlan, quantizer: TensorQuantizer | None) -> Solved:
    """Return the float weight of a layer together with the codes that its quantizer gives."""
    weight = canonical(module.get_parameter("weight").detach(), plan.kind, num_groups(module))
    params = None if quantizer is None else quantizer.params
    if params is None:
        return Solved(plan, weight, round_to_nearest(weight, plan.weight), None)
    return Solved(plan, weight, quantize_weight(weight, params, plan.weight), None)


def activation_quantizers(plan: LayerPlan, learned: Activations) -> dict[str, TensorQuantizer | None]:
    """Make the quantizers of a layer whose weight and bias are already rounded."""
    return {
        "input_quantizer": _of_activation(plan.config.input_tensors, learned.inputs),
        "weight_quantizer": None,
        "bias_quantizer": None,
        "output_quantizer": _of_activation(plan.config.output_tensors, learned.outputs),
    }


def quantize_layer(module: nn.Module, plan: LayerPlan, quantizers: dict[str, TensorQuantizer | None]) -> None:
    """Turn ``module`` into a quantized layer, in place."""
    for name, value in {**quantizers, "plan": plan, "frozen": False}.items():
        setattr(module, name, value)
    module.__class__ = quantized_class(type(module))
    if "_old_forward" in module.__dict__:  # Accelerate's hook (device_map) holds the float layer's bound method
        setattr(module, "_old_forward", MethodType(type(module).forward, module))  # noqa: B010  # no type says it


def quantize_caches(model: nn.Module) -> None:
    """Let attention pass keys and values through the output quantizers of their layers where they enter a cache."""
    layers = {layer.plan: layer for _, layer in quantized_layers(model)}
    list(tap_caches(layers, model, lambda plan: layers[plan].output_quantizer))  # its taps stay


def _of_activation(spec: QuantizationSpec | None, params: QParams | None) -> TensorQuantizer | None:
    return None if spec is None else TensorQuantizer(spec, params)
