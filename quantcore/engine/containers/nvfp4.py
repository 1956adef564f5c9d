"""Writes MXFP4 weights as NVFP4 without changing a value.

Both have the same fp4 codes. MXFP4 has a power of two for every 32 of them, NVFP4 an e4m3 scale for every 16 under one
float32 scale of the layer. An e4m3 number can be each of the 18 powers of two from 2^-9 to 2^8, so that a layer fits if
the exponents of its blocks lie within 18 in a row; blocks of zeros fit anywhere. Layers that share a global scale (see
``solvers.global_scale``) must fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import Dtype, QSchemeType, QuantizationSpec, ScaleType
from quantcore.engine.containers.dequantize import read_layer
from quantcore.engine.solvers.global_scale import by_global_scale
from quantcore.errors import ConfigError
from quantcore.importing.model import QuantizedLayers
from quantcore.tensors.affine import QParams
from quantcore.tensors.qtensor import QLayer, QTensor

MX_GROUP, NV_GROUP = 32, 16
NVFP4 = QuantizationSpec(dtype=Dtype.fp4, qscheme=QSchemeType.per_group, group_size=NV_GROUP, scale_type=ScaleType.e4m3)
LARGEST, SMALLEST = 8, -9
"""Exponents of the largest and the smallest power of two that e4m3 holds."""
_OFFSET = 150
"""Added to an exponent for its place in a count: float32 has none below -149."""


@dataclass(frozen=True)
class AsNvfp4:
    """The layers of a model as they will be written, and for those that were MXFP4 the exponent of the global scale."""

    layers: dict[str, LayerPlan]
    exponents: dict[str, int]

    def recoded(self, name: str, quantized: QLayer) -> QLayer:
        """Return the layer whose weight is called ``name`` as it will be written: the same values."""
        if name not in self.exponents:
            return quantized
        weight, exponent = quantized.weight, self.exponents[name]
        used = torch.where(_is_used(weight), _exponents(weight.params.scale), LARGEST + exponent)
        scale = torch.ldexp(torch.ones_like(weight.params.scale), used - exponent)
        params = QParams(
            scale.repeat_interleave(MX_GROUP // NV_GROUP, dim=1),
            global_scale=torch.ldexp(torch.ones(()), torch.tensor(exponent)),
        )
        return replace(quantized, weight=QTensor(weight.codes, params, self.layers[name].weight))


def plan_nvfp4(quantized: QuantizedLayers, progress: Callable[[int, int], None]) -> AsNvfp4:
    """Return how the MXFP4 weights of ``quantized`` are written as NVFP4. Reads every weight once, one at a time.

    Raises ConfigError ``not_lossless`` with the share of the blocks that do not fit, and ``incompatible_export`` for a
    model without MXFP4 weights or with MXFP4 inputs.
    """
    old = {name: layer for name, layer in quantized.layers.items() if _is_mxfp4(layer)}
    if not old:
        raise ConfigError(
            "The model has no MXFP4 weights, and only those can be written as NVFP4 without loss.",
            code="incompatible_export",
            hint="Remove --nvfp4.",
        )
    if active := next((layer for layer in old.values() if _has_mx_inputs(layer)), None):
        raise ConfigError(
            f"{active.name} rounds its inputs to groups with e8m0 scales ({active.scheme}), which no NVFP4 layer does.",
            code="incompatible_export",
            hint="Convert a model with weights alone in MXFP4, or quantize the original model: nvfp4.",
        )
    new = {name: _nvfp4(layer) for name, layer in old.items()}
    counts: dict[LayerPlan, torch.Tensor] = {}
    for number, (name, layer) in enumerate(old.items(), start=1):
        counts[new[name]] = _counts(read_layer(quantized, layer).weight)
        progress(number, len(old))
    exponents = _global_exponents(counts)
    return AsNvfp4({**quantized.layers, **new}, {name: exponents[layer] for name, layer in new.items()})


def _global_exponents(counts: Mapping[LayerPlan, torch.Tensor]) -> dict[LayerPlan, int]:
    """Return the exponent of each layer's global scale. ``counts``: of its blocks by exponent."""
    exponents: dict[LayerPlan, int] = {}
    misfits: dict[LayerPlan, int] = {}
    for group in by_global_scale(counts):
        places = torch.stack([counts[layer] for layer in group]).sum(0).nonzero()
        highest = int(places.max()) - _OFFSET if len(places) else LARGEST
        exponents |= dict.fromkeys(group, highest - LARGEST)
        for layer in group:
            misfits[layer] = int(counts[layer][: max(0, highest - LARGEST + SMALLEST + _OFFSET)].sum())
    if any(misfits.values()):
        total = sum(int(count.sum()) for count in counts.values())
        worst = max(misfits, key=lambda layer: misfits[layer])
        num_misfits = sum(misfits.values())
        raise ConfigError(
            f"{num_misfits} of {total} blocks ({num_misfits / total:.2%}) cannot be written as NVFP4 without loss: "
            "their scales are more than 2^17 below the largest one that shares a global scale with them. Most are in "
            f"{worst.name} ({misfits[worst]}).",
            code="not_lossless",
            hint="Keep MXFP4 (remove --nvfp4), or quantize the original model: bitfoundry quantize MODEL nvfp4.",
        )
    return exponents


def _is_mxfp4(layer: LayerPlan) -> bool:
    spec = layer.weight
    return (spec.dtype, spec.scale_type, spec.group_size) == (Dtype.fp4, ScaleType.e8m0, MX_GROUP)


def _has_mx_inputs(layer: LayerPlan) -> bool:
    return layer.input_tensors is not None and layer.input_tensors.scale_type is ScaleType.e8m0


def _nvfp4(layer: LayerPlan) -> LayerPlan:
    return replace(layer, config=replace(layer.config, weight=NVFP4))


def _is_used(weight: QTensor) -> torch.Tensor:
    """Return [O, G]: whether a block of 32 holds another value than zero."""
    values = weight.spec.format.decode(weight.codes)
    return values.reshape(len(values), -1, MX_GROUP).any(-1)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    """Return the exponents of powers of two, as integers."""
    return torch.frexp(scale).exponent - 1


def _counts(weight: QTensor) -> torch.Tensor:
    """Return the number of used blocks by the exponent of their scale, plus ``_OFFSET``."""
    used = _exponents(weight.params.scale)[_is_used(weight)]
    return torch.bincount(used.flatten() + _OFFSET, minlength=2 * _OFFSET)
