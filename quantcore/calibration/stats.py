"""What calibration learns about the input of each layer, gathered with hooks while a block runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quantcore.affine import affine_params, fake_quantize, min_max, scale_dtype
from quantcore.config import QSchemeType, QuantizationSpec
from quantcore.errors import NumericsError
from quantcore.layer import LayerPlan
from quantcore.observers.min_max import MinMax
from quantcore.qtensor import QParams


@contextmanager
def collect_ranges(modules: dict[LayerPlan, nn.Module]) -> Iterator[dict[LayerPlan, MinMax]]:
    """Watch the inputs of the layers that need a static range; yields the observers, filled while the block runs."""
    observers = {layer: MinMax() for layer in modules if layer.config.needs_calibration}

    def watch(layer: LayerPlan) -> torch.utils.hooks.RemovableHandle:
        return modules[layer].register_forward_pre_hook(lambda _, inputs: observers[layer].update(inputs[0]))

    with _removed(watch(layer) for layer in observers):
        yield observers


def input_params(layer: LayerPlan, observer: MinMax, model_dtype: torch.dtype) -> QParams:
    """The static scale and zero point of ``layer``'s input, as scalars. Raises NumericsError for a range not finite."""
    spec = layer.input_tensors
    assert spec is not None
    minimum, maximum = observer.range()
    if not torch.isfinite(maximum - minimum):
        raise NumericsError(
            f"The input of {layer.name} became NaN or infinite on the calibration text.",
            code="nonfinite_activations",
            hint="The float model itself overflows; try a bfloat16 or float32 checkpoint.",
        )
    scale, zero_point = affine_params(minimum.view(1, 1), maximum.view(1, 1), spec, scale_dtype(spec, model_dtype))
    return QParams(scale.view(()), None if zero_point is None else zero_point.view(()))


@contextmanager
def quantized_inputs(modules: dict[LayerPlan, nn.Module], params: dict[LayerPlan, QParams]) -> Iterator[None]:
    """While this lasts, every layer with an input spec sees its input through quantize and dequantize."""

    def hook(layer: LayerPlan, spec: QuantizationSpec) -> torch.utils.hooks.RemovableHandle:
        return modules[layer].register_forward_pre_hook(
            lambda _, inputs: (quantize_input(inputs[0], spec, params.get(layer)), *inputs[1:])
        )

    with _removed(hook(layer, layer.input_tensors) for layer in modules if layer.input_tensors is not None):
        yield


def quantize_input(x: torch.Tensor, spec: QuantizationSpec, static: QParams | None) -> torch.Tensor:
    """Activations [..., T, I] after fake quantization: with the static scale, else one scale a token or a tensor."""
    x_TI = x.reshape(-1, x.shape[-1])
    if static is not None:
        scale = static.scale.to(x.device).view(1, 1)
        zero_point = None if static.zero_point is None else static.zero_point.to(x.device).view(1, 1)
    else:
        rows = x_TI.shape[0] if spec.qscheme is QSchemeType.per_channel else 1
        scale, zero_point = affine_params(*min_max(x_TI, rows, 1), spec, torch.float32)
    return fake_quantize(x_TI, scale, zero_point, spec.format, spec.round_method.value).reshape(x.shape)


@contextmanager
def _removed(handles: Iterable[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()
