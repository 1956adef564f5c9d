"""What scale-only distillation can tune: checked before a job begins. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from quantcore.config.algorithms import DistillConfig, SolverConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.config.spec import QuantizationSpec, ScaleType, ZeroPointType
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS, Container

TUNABLE = (ScaleType.float, ScaleType.float32, ScaleType.float16, ScaleType.bfloat16)


def check_distillation(config: Config, layers: Sequence[LayerPlan], exports: Sequence[str]) -> None:
    """Raise ConfigError if the chain has distillation beside something that it cannot work with."""
    if config.distills is None:
        return
    for algorithm in config.algo_config:
        if not isinstance(algorithm, DistillConfig | SolverConfig):
            raise _refused(
                f"{algorithm.name} changes tensors other than the codes, which distill reads from the float model",
                f"Leave {algorithm.name} or distill out.",
            )
    for export in exports:
        if isinstance(EXPORTERS.get(export), Container):
            raise _refused(
                f"a file of the format {export} is written in one go, and distill changes scales that are written",
                "Export another format, or leave distill out.",
            )
    for layer in layers:
        beside = [layer.config.input_tensors, layer.config.output_tensors, layer.config.bias]
        if any(spec is not None for spec in beside):
            why = "has quantized activations or a quantized bias, and distill runs the model with rounded weights alone"
        elif layer.block is None:
            why = "lies outside the decoder blocks, which distill does not tune"
        else:
            why = _why_fixed(layer.weight)
        if why:
            raise _refused(f"the layer {layer.name} {why}", "Exclude such layers, take w2a16, or leave distill out.")


def _why_fixed(spec: QuantizationSpec) -> str:
    """Return why the scales of a weight cannot be tuned one by one; an empty string if they can."""
    if not spec.format.scaled:
        return f"has no scales ({spec.dtype})"
    if spec.scale_type not in TUNABLE:
        return f"has scales of the type {spec.scale_type}, which are too coarse to tune or are rounded together"
    if spec.over is not None:
        return "is quantized in two stages, whose codes depend on each other's scales"
    if spec.zero_point_type is ZeroPointType.float32:
        return "has real zero points, which are stored as a product with the scale"
    return ""


def _refused(why: str, hint: str) -> ConfigError:
    return ConfigError(
        f"distill tunes the scales of rounded weights, and {why}.",
        code="unsupported_config",
        hint=hint,
        field="/algo_config",
    )
