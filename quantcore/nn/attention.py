"""Quantizes inside the attention of a model in memory, through Transformers' ``AttentionInterface``.

fp8 attention (``Config.softmax_quant_spec``): quantizes and dequantizes queries and attention probabilities. If the
config has a spec for the output of q_proj, queries are quantized there and not again here: this is AMD Quark's form,
and the only one that files can store. The function registered here runs the model's own eager attention, so that its
special steps (soft caps, sinks) stay, and sends the output of its softmax through a quantizer.

R3 (QuaRot, Ashkboos et al. 2024): queries and keys of every head are rotated by one orthogonal matrix, after RoPE.
Their products do not change, and outliers in one channel of the keys are spread over the whole head. A spec for the
output of k_proj then applies to these keys. It is applied to all keys of a call, including those in the cache: static
scales, and dynamic ones of a token, give the same result as a cache of codes. Without R3 keys are quantized where they
enter the cache, as values always are (``cache_taps``).

Legend: B batch, H heads of the keys, T tokens, D channels of a head.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.ranges import observer_of
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.engine.observers import Observer
from quantcore.engine.transforms.rotation.hadamard import orthogonal
from quantcore.errors import CalibrationError, ConfigError, NumericsError
from quantcore.tensors.affine import find_params, static_params

EAGER, SDPA = "quantcore", "quantcore_sdpa"
SOFTMAX = (torch.softmax, torch.Tensor.softmax, nn.functional.softmax)
KEYS, QUERIES = "k_proj", "q_proj"
"""Names of the key and query projections in models with pluggable attention."""

_IDENTITY = nn.Identity()


class HeadRotation(nn.Module):
    """Rotates every head (R3) by a Hadamard matrix, or by equal blocks on the diagonal if none has its size."""

    def forward(self, x_BHTD: torch.Tensor) -> torch.Tensor:
        return orthogonal(x_BHTD.shape[-1], random_signs=False).apply(x_BHTD)


class _Watching(nn.Module):
    """A placeholder for a quantizer while its range is learned."""

    def __init__(self, spec: QuantizationSpec, observer: Observer) -> None:
        super().__init__()
        self.spec = spec
        self.observer = observer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observer.update(x)
        return x


class _SoftmaxThrough(TorchFunctionMode):
    """Sends the output of every softmax through ``quantizer`` while the mode is active."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self._quantizer = quantizer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self._quantizer(result) if func in SOFTMAX else result


def quantized_attention(
    module: nn.Module, query_BHTD: torch.Tensor, key_BHTD: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run the eager attention of the module's source file with the rotation and quantizers that ``module`` has."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    with _SoftmaxThrough(_part(module, "softmax_quantizer")):
        return eager(module, *_rotated_and_quantized(module, query_BHTD, key_BHTD), *args, **kwargs)


def quantized_sdpa(
    module: nn.Module, query_BHTD: torch.Tensor, key_BHTD: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute torch's fused attention with quantized inputs; its probabilities cannot be quantized."""
    return sdpa_attention_forward(module, *_rotated_and_quantized(module, query_BHTD, key_BHTD), *args, **kwargs)


AttentionInterface.register(EAGER, quantized_attention)
AttentionMaskInterface.register(EAGER, eager_mask)
AttentionInterface.register(SDPA, quantized_sdpa)
AttentionMaskInterface.register(SDPA, sdpa_mask)


def _rotated_and_quantized(
    module: nn.Module, query_BHTD: torch.Tensor, key_BHTD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rotate = _part(module, "head_rotation")
    query_BHTD, key_BHTD = _part(module, "query_quantizer")(rotate(query_BHTD)), rotate(key_BHTD)
    if "key_quantizer" in module._modules:
        key_BTHD = key_BHTD.transpose(1, 2)
        quantized_BTI = _part(module, "key_quantizer")(key_BTHD.flatten(2))  # in the layout of the projection's output
        key_BHTD = quantized_BTI.unflatten(-1, key_BTHD.shape[2:]).transpose(1, 2)
    return query_BHTD, key_BHTD


def _part(module: nn.Module, name: str) -> nn.Module:
    return module._modules.get(name) or _IDENTITY


@contextmanager
def attention_watched(
    model: nn.Module,
    softmax: QuantizationSpec | None,
    keys: dict[str, QuantizationSpec] | None = None,
    quantized: Collection[str] = (),
) -> Iterator[dict[str, nn.Module]]:
    """Let the attention modules of ``model`` learn their ranges inside the block; afterwards they quantize.

    ``softmax`` is the spec of queries and probabilities; queries from a layer that is named in ``quantized`` are not
    quantized again. With ``keys`` R3 is active, and the keys of the modules that it names are quantized. Yields the
    modules by name. If anything fails inside, the model is restored.

    Raises ConfigError for a model without pluggable attention, CalibrationError for a module that saw no data.
    """
    modules = attention_modules(model, "softmax_quant_spec" if keys is None else "rotation r3")
    assert isinstance(model, PreTrainedModel)
    before = model.config._attn_implementation
    queries = {name: None if f"{name}.{QUERIES}" in quantized else softmax for name in modules}
    parts = {name: _parts(softmax, queries[name], keys is not None, (keys or {}).get(name)) for name in modules}
    _add(modules, parts)
    model.set_attn_implementation(SDPA if before == "sdpa" and softmax is None else EAGER)
    try:
        yield modules
        learned = {
            name: {part_name: _learned(name, part) for part_name, part in made.items()} for name, made in parts.items()
        }
    except BaseException:
        model.set_attn_implementation(before)
        for name, module in modules.items():
            for part_name in parts[name]:
                delattr(module, part_name)
        raise
    _add(modules, learned)


def keys_behind_rope(
    model: nn.Module, modules: dict[LayerPlan, nn.Module]
) -> tuple[dict[LayerPlan, nn.Module], dict[str, QuantizationSpec]]:
    """Return ``modules`` without specs of the key projections' outputs, and these specs by the name of the attention.

    Raises ConfigError for a model without pluggable attention.
    """
    attentions = attention_modules(model, "rotation r3")
    without: dict[LayerPlan, nn.Module] = {}
    keys: dict[str, QuantizationSpec] = {}
    for plan, module in modules.items():
        attention, _, name = plan.name.rpartition(".")
        if name == KEYS and attention in attentions and plan.config.output_tensors is not None:
            keys[attention] = plan.config.output_tensors
            plan = replace(plan, config=replace(plan.config, output_tensors=None))
        without[plan] = module
    return without, keys


def attention_modules(model: nn.Module, purpose: str) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that get their attention from the ``AttentionInterface``.

    Raises ConfigError if there are none; ``purpose`` names the setting that needs them.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in _names_in(type(module).forward)
        and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")
    }
    if not modules or not isinstance(model, PreTrainedModel) or not model._can_set_attn_implementation():
        raise ConfigError(
            f"{type(model).__name__} has no replaceable attention, so {purpose} does not apply.",
            code="no_pluggable_attention",
            hint="Remove it. It works with models that use the AttentionInterface of Transformers.",
            field="/softmax_quant_spec" if purpose == "softmax_quant_spec" else "/algo_config",
        )
    return modules


def _names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def _parts(
    softmax: QuantizationSpec | None, queries: QuantizationSpec | None, rotated: bool, keys: QuantizationSpec | None
) -> dict[str, nn.Module]:
    """Return the new parts of an attention module by name; quantizers with ranges to learn are still ``_Watching``."""
    specs = {"query_quantizer": queries, "key_quantizer": keys, "softmax_quantizer": softmax}
    parts: dict[str, nn.Module] = {"head_rotation": HeadRotation()} if rotated else {}
    for name, spec in specs.items():
        if spec is not None:
            observer = observer_of(spec)
            parts[name] = TensorQuantizer(spec, None) if observer is None else _Watching(spec, observer)
    return parts


def _add(modules: dict[str, nn.Module], parts: dict[str, dict[str, nn.Module]]) -> None:
    for name, module in modules.items():
        for part_name, part in parts[name].items():
            module.add_module(part_name, part)


def _learned(name: str, part: nn.Module) -> nn.Module:
    if not isinstance(part, _Watching):
        return part
    if part.observer.num_values == 0:
        raise CalibrationError(
            f"The attention {name} saw no data.",
            code="layers_without_data",
            hint="Use batches that reach it, or specs with is_dynamic=True.",
        )
    minimum, maximum = part.observer.range()
    if not torch.isfinite(maximum - minimum).all():
        raise NumericsError(
            f"Queries, keys or probabilities of {name} became NaN or infinite on the calibration data.",
            code="nonfinite_activations",
            hint="The float model itself overflows. Use bfloat16 or float32.",
        )
    params = find_params(minimum, maximum, part.spec, torch.float32)
    return TensorQuantizer(part.spec, static_params(params, part.spec))
