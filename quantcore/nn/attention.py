"""fp8 attention: queries and attention probabilities through quantize and dequantize (``Config.softmax_quant_spec``).

Keys and values are outputs of their projections and are quantized there. The rest is done behind Transformers'
``AttentionInterface``: the function registered here runs the model's own eager attention, so that what a model does
besides (soft caps, sinks) stays, and sends what its softmax gives through a quantizer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from quantcore.affine import find_params
from quantcore.errors import CalibrationError, ConfigError, NumericsError
from quantcore.grouping import activation_grouping
from quantcore.nn.tensor_quantizer import TensorQuantizer
from quantcore.observers import observer_for
from quantcore.spec import QuantizationSpec

IMPLEMENTATION = "quantcore"
PARTS = ("query_quantizer", "softmax_quantizer")
SOFTMAX = (torch.softmax, torch.Tensor.softmax, nn.functional.softmax)


class _Watching(nn.Module):
    """In a quantizer's place while its range is being learned."""

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__()
        self.spec = spec
        self.observer = observer_for(spec, activation_grouping(spec))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observer.update(x)
        return x


class _SoftmaxThrough(TorchFunctionMode):
    """While this lasts, what a softmax gives passes through ``quantizer``."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self._quantizer = quantizer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self._quantizer(result) if func in SOFTMAX else result


def quantized_attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of the file that ``module``'s class comes from, with query and probabilities quantized."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    with _SoftmaxThrough(module.get_submodule("softmax_quantizer")):
        return eager(module, module.get_submodule("query_quantizer")(query), *args, **kwargs)


AttentionInterface.register(IMPLEMENTATION, quantized_attention)
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


@contextmanager
def attention_watched(model: nn.Module, spec: QuantizationSpec) -> Iterator[dict[str, nn.Module]]:
    """While this lasts, the attention modules of ``model`` learn the ranges that ``spec`` needs; afterwards they
    quantize. Yields them by name. If anything fails inside, the model is as it was.

    Raises ConfigError for a model without pluggable attention, CalibrationError for one that saw nothing.
    """
    modules = attention_modules(model)
    assert isinstance(model, PreTrainedModel)
    before = model.config._attn_implementation
    for module in modules.values():
        for part in PARTS:
            module.add_module(part, _Watching(spec) if spec.is_static else TensorQuantizer(spec, None))
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield modules
        learned = {name: [_learned(name, module, part) for part in PARTS] for name, module in modules.items()}
    except BaseException:
        model.set_attn_implementation(before)
        for module in modules.values():
            for part in PARTS:
                delattr(module, part)
        raise
    for name, module in modules.items():
        for part, quantizer in zip(PARTS, learned[name], strict=True):
            module.add_module(part, quantizer)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that ask the ``AttentionInterface`` for their attention. Raises ConfigError if none."""
    found = {
        name: module
        for name, module in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in _names_in(type(module).forward)
        and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")
    }
    if not found or not isinstance(model, PreTrainedModel) or not model._can_set_attn_implementation():
        raise ConfigError(
            f"{type(model).__name__} has no attention that can be replaced, so softmax_quant_spec means nothing here.",
            code="no_pluggable_attention",
            hint="Leave it out. Models of Transformers that use its AttentionInterface have one.",
            field="/softmax_quant_spec",
        )
    return found


def _names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def _learned(name: str, module: nn.Module, which: str) -> nn.Module:
    part = module.get_submodule(which)
    if not isinstance(part, _Watching):
        return part
    if part.observer.num_values == 0:
        raise CalibrationError(
            f"The attention {name} saw no data.",
            code="layers_without_data",
            hint="Give batches that reach it, or a softmax_quant_spec with is_dynamic=True.",
        )
    minimum, maximum = part.observer.range()
    if not torch.isfinite(maximum - minimum).all():
        raise NumericsError(
            f"The query or the probabilities of {name} became NaN or infinite on the calibration data.",
            code="nonfinite_activations",
            hint="The float model itself overflows; try bfloat16 or float32.",
        )
    return TensorQuantizer(part.spec, find_params(minimum, maximum, part.spec, torch.float32))
