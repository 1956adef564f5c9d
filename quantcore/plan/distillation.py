"""Checks, before a job begins, that scale-only distillation can tune its layers, and plans its cost. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantcore.config.algorithms import DistillConfig, SolverConfig
from quantcore.config.grouping import weight_grouping
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.config.spec import QuantizationSpec, ScaleType, ZeroPointType
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS, Container

NUM_HELD_BACK = 8
"""Number of calibration windows that neither rounding nor tuning sees: they decide if tuning gained."""
BYTES_PER_SCALE = 5 * 4
"""A factor, its gradient and sum of gradients, and Adam's two moments, in float32."""
SAVED_BYTES_PER_SCALE = 2 * 3 * 4
"""The factor and both moments in the savepoint, twice while the state of a step replaces that of the one before."""
TUNABLE = (ScaleType.float, ScaleType.float32, ScaleType.float16, ScaleType.bfloat16)


def check_distillation(config: Config, layers: Sequence[LayerPlan], exports: Sequence[str]) -> None:
    """Raise ConfigError if distillation cannot work with the rest of the chain."""
    if config.distills is None:
        return
    for algorithm in config.algo_config:
        if not isinstance(algorithm, DistillConfig | SolverConfig):
            raise _refused(
                f"{algorithm.name} changes tensors other than the codes, which distill reads from the float model",
                f"Remove {algorithm.name} or distill.",
            )
    for export in exports:
        if isinstance(EXPORTERS.get(export), Container):
            raise _refused(
                f"a file in the {export} format is written in one pass, but distill changes scales afterwards",
                "Export another format, or remove distill.",
            )
    for layer in layers:
        beside = [layer.config.input_tensors, layer.config.output_tensors, layer.config.bias]
        if any(spec is not None for spec in beside):
            why = "has quantized activations or a quantized bias, but distill quantizes only weights"
        elif layer.block is None:
            why = "lies outside the decoder blocks, which distill does not tune"
        else:
            why = _why_fixed(layer.weight)
        if why:
            raise _refused(f"the layer {layer.name} {why}", "Exclude such layers, use w2a16, or remove distill.")


def bytes_of_scales(layers: Sequence[LayerPlan]) -> dict[str, int]:
    """Return the bytes of what tunes the scales of each weight, by its name."""
    counts = {f"{layer.name}.weight": weight_grouping(layer.weight).num_scales(layer.shape) for layer in layers}
    return {name: BYTES_PER_SCALE * math.prod(count) for name, count in counts.items()}


def num_passes(options: DistillConfig, passes_back: int) -> int:
    """Return the cost in windows that go forward: the float model's, tuning, and the held-back ones twice."""
    return passes_back * options.epochs * options.num_windows + options.num_windows + 3 * NUM_HELD_BACK


def _why_fixed(spec: QuantizationSpec) -> str:
    """Return why the scales of a weight cannot be tuned one by one; an empty string if they can."""
    if not spec.format.scaled:
        return f"has no scales ({spec.dtype})"
    if spec.scale_type not in TUNABLE:
        return f"has scales of type {spec.scale_type}, which are too coarse to tune or are rounded together"
    if spec.over is not None:
        return "is quantized in two stages, whose codes depend on each other's scales"
    if spec.zero_point_type is ZeroPointType.float32:
        return "has real zero points, which are stored as a product with the scale"
    return ""


def _refused(why: str, hint: str) -> ConfigError:
    return ConfigError(
        f"distill tunes the scales of rounded weights, but {why}.",
        code="unsupported_config",
        hint=hint,
        field="/algo_config",
    )
