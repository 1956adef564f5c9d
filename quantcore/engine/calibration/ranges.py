"""Ranges of the inputs and outputs of each layer, gathered with hooks while a block runs.

The outputs of layers that compute keys and values of a KV cache are taken where they enter it: see ``cache_taps``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from quantcore.config.grouping import PER_TENSOR, activation_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import learns_from_data
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.expert_token_topup import are_lent
from quantcore.engine.model.cache_taps import Through, tap_caches
from quantcore.engine.observers import Observer, observer_for
from quantcore.engine.runtime.ranks import Ranks
from quantcore.engine.runtime.shards import counts
from quantcore.errors import NumericsError
from quantcore.tensors.affine import QParams, fake_quantize_activation, find_params, static_params


@dataclass(frozen=True)
class Watched:
    """The observers of a layer's input and output (of what enters the cache); None where nothing is learned."""

    inputs: Observer | None
    outputs: Observer | None


@dataclass(frozen=True)
class Activations:
    """The static parameters of a layer's input and output (of what enters the cache); None where there are none."""

    inputs: QParams | None = None
    outputs: QParams | None = None

    def on(self, device: torch.device) -> Activations:
        """Return the parameters on ``device``."""
        return Activations(*(None if part is None else part.on(device) for part in (self.inputs, self.outputs)))

    def as_floats(self) -> list[list[float]]:
        """Return the scales and zero points of input and output, for an exact comparison through JSON."""
        params = [part for part in (self.inputs, self.outputs) if part is not None]
        numbers = [number for part in params for number in (part.scale, part.zero_point)]
        return [[] if number is None else number.flatten().tolist() for number in numbers]


@contextmanager
def collect_ranges(modules: Mapping[LayerPlan, nn.Module], within: nn.Module) -> Iterator[dict[LayerPlan, Watched]]:
    """Watch the tensors that need static parameters; yield the observers, which fill while the block runs.

    ``within`` holds the modules and the attention around them.
    """
    watched = {
        layer: Watched(observer_of(layer.config.input_tensors), observer_of(layer.config.output_tensors))
        for layer in modules
        if layer.config.needs_calibration
    }

    def watch() -> Iterator[torch.utils.hooks.RemovableHandle]:
        for layer, observers in watched.items():
            if observers.inputs is not None:
                yield modules[layer].register_forward_pre_hook(_update_with_input(observers.inputs))
            if observers.outputs is not None and not layer.is_cached:
                yield modules[layer].register_forward_hook(_update_with_output(observers.outputs))
        yield from tap_caches(modules, within, lambda layer: _seen_by(watched[layer].outputs))

    with _removed(watch()):
        yield watched


def ranges_of_all(watched: dict[LayerPlan, Watched], ranks: Ranks) -> dict[LayerPlan, Watched]:
    """Merge the observers of all ranks, on every rank. The order of merging changes no bit."""
    first, *others = ranks.gather(list(watched.values()))
    for other in others:
        for own, theirs in zip(first, other, strict=True):
            for observer, more in ((own.inputs, theirs.inputs), (own.outputs, theirs.outputs)):
                if observer is not None and more is not None:
                    observer.merge(more)
    return dict(zip(watched, first, strict=True))


def learned(layer: LayerPlan, watched: Watched, model_dtype: torch.dtype) -> Activations:
    """Return the static parameters of ``layer``. Raises NumericsError for a range that is not finite."""
    return Activations(
        _params(layer, "input", layer.config.input_tensors, watched.inputs, model_dtype),
        _params(layer, "output", layer.config.output_tensors, watched.outputs, model_dtype),
    )


@contextmanager
def quantized_activations(
    modules: Mapping[LayerPlan, nn.Module], activations: Mapping[LayerPlan, Activations], within: nn.Module
) -> Iterator[None]:
    """Pass inputs and outputs that have a spec through quantize and dequantize while this lasts.

    ``within`` holds the modules and the attention around them.
    """

    def ranges_of(layer: LayerPlan) -> Activations:
        return activations.get(layer, Activations()).on(modules[layer].get_parameter("weight").device)

    def cached(layer: LayerPlan) -> Through:
        spec, static = layer.config.output_tensors, ranges_of(layer).outputs
        assert spec is not None
        return lambda x: _quantized(x, spec, static)

    def hook() -> Iterator[torch.utils.hooks.RemovableHandle]:
        for layer, module in modules.items():
            ranges = ranges_of(layer)
            if layer.config.input_tensors is not None:
                yield module.register_forward_pre_hook(_quantize_input(layer.config.input_tensors, ranges.inputs))
            if layer.config.output_tensors is not None and not layer.is_cached:
                yield module.register_forward_hook(_quantize_output(layer.config.output_tensors, ranges.outputs))
        yield from tap_caches(modules, within, cached)

    with _removed(hook()):
        yield


def observer_of(spec: QuantizationSpec | None) -> Observer | None:
    """Make the observer that learns an activation's range; None where there is nothing to learn."""
    if spec is None or not learns_from_data(spec):
        return None
    return observer_for(spec, PER_TENSOR if spec.is_dynamic else activation_grouping(spec))


def _params(
    layer: LayerPlan, what: str, spec: QuantizationSpec | None, observer: Observer | None, model_dtype: torch.dtype
) -> QParams | None:
    if spec is None or observer is None:
        return None
    minimum, maximum = observer.range()
    if not torch.isfinite(maximum - minimum).all():
        raise NumericsError(
            f"The {what} of {layer.name} became NaN or infinite on the calibration text.",
            code="nonfinite_activations",
            hint="The float model itself overflows. Use a bfloat16 or float32 checkpoint.",
        )
    return static_params(find_params(minimum, maximum, spec, model_dtype), spec)


def _update_with_input(observer: Observer):  # type: ignore[no-untyped-def]  # a hook
    return lambda _, inputs: observer.update(inputs[0]) if _is_seen(inputs[0]) else None


def _update_with_output(observer: Observer):  # type: ignore[no-untyped-def]  # a hook
    return lambda _, __, output: observer.update(output) if _is_seen(output) else None


def _seen_by(observer: Observer | None) -> Through | None:
    """Return a function that shows ``observer`` the keys or values that enter a cache."""
    if observer is None:
        return None

    def see(x: torch.Tensor) -> torch.Tensor:
        if _is_seen(x):
            observer.update(x)
        return x

    return see


def _is_seen(x: torch.Tensor) -> bool:
    """Return False for tokens lent to an expert, too: ranges are shared by a rule of their own (``share_ranges``)."""
    return counts(x) and not are_lent()


def _quantize_input(spec: QuantizationSpec, static: QParams | None):  # type: ignore[no-untyped-def]  # a hook
    return lambda _, inputs: (_quantized(inputs[0], spec, static), *inputs[1:])


def _quantize_output(spec: QuantizationSpec, static: QParams | None):  # type: ignore[no-untyped-def]  # a hook
    return lambda _, __, output: _quantized(output, spec, static)


def _quantized(x: torch.Tensor, spec: QuantizationSpec, static: QParams | None) -> torch.Tensor:
    return fake_quantize_activation(x, spec, static) if x.numel() else x


@contextmanager
def _removed(handles: Iterable[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()
