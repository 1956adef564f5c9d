"""Names the layers with the largest error, for which more bits pay the most, and what they would cost. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from quantcore.checkpoint.fused import fused_groups, group_of
from quantcore.checkpoint.headers import main_dtype, scale_dtype
from quantcore.checkpoint.layout import TensorHeader
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.preset_table import PRESETS
from quantcore.config.quantization import Config
from quantcore.config.recipes import EFFORTS, recipe
from quantcore.export import EXPORTERS, Exporter, holds_codes
from quantcore.export.exporter import layouts_of
from quantcore.plan.planner import Plan
from quantcore.report.layer import LayerError
from quantcore.report.quality import Step

NUM_LAYERS = 4
"""Number of layers that are named; more, if a program computes them in one product with others."""
EIGHT_BITS = ("int8_weight_only", "gguf_q8_0")
EIGHT_BITS_WITH_INPUTS = ("fp8_dynamic", "int8_dynamic")
"""Presets of 8 bits, for layers whose inputs are floats and for others. The first that the format can hold is taken."""
ANOTHER_EXPORT = "compressed_tensors"
"""The format that holds most mixes of schemes, if that of the result cannot hold one."""


class LayerSizes:
    """The bytes of layers in an export. ``tensors`` are the headers of the float model."""

    def __init__(self, plan: Plan, tensors: Mapping[str, TensorHeader]) -> None:
        self._tensors = tensors
        self._computed = main_dtype(tensors)
        self._plan = plan

    def of(self, layer: LayerPlan, exporter: Exporter) -> int:
        dtype = scale_dtype(self._tensors[f"{layer.name}.weight"].dtype, self._computed)
        return sum(entry.num_bytes for entry in layouts_of(exporter, layer, dtype).values())

    def added_to(self, errors: Iterable[LayerError]) -> tuple[LayerError, ...]:
        """Return ``errors`` with the number of weights and the bytes of each layer in the main export."""
        layers = {layer.name: layer for layer in self._plan.layers}
        if not holds_codes(self._plan.main_export):
            return tuple(errors)
        exporter = EXPORTERS.get(self._plan.main_export)
        return tuple(
            error.replace(num_weights=math.prod(layers[error.name].shape), bytes=self.of(layers[error.name], exporter))
            for error in errors
        )


def more_bits(
    config: Config, plan: Plan, tensors: Mapping[str, TensorHeader], errors: Sequence[LayerError]
) -> Step | None:
    """Return the step that keeps the layers with the largest errors of their outputs in 8 bits.

    None if no output was measured, if the scheme is no preset (its flags are not known), if all of these layers have 8
    bits already, or if no format holds both schemes.
    """
    flags, worst = preset_flags(config), _worst(errors)
    if flags is None or not worst or not holds_codes(plan.main_export):
        return None
    layers = {layer.name: layer for layer in plan.layers}
    found = _finer(plan, [layers[name] for name in worst])
    if found is None:
        return None
    export, scheme, finer = found
    sizes, now, then = LayerSizes(plan, tensors), EXPORTERS.get(plan.main_export), EXPORTERS.get(export)
    more = sum(sizes.of(layer, then) - sizes.of(layers[layer.name], now) for layer in finer)
    if more <= 0:
        return None
    own = {layer.name: layer.config for layer in finer}
    mixed = replace(config, layer_quant_config={**own, **config.layer_quant_config})
    is_other = export != plan.main_export
    chosen = [word for name in worst for word in ("--layer_quant_scheme", name, scheme)]
    return Step(
        text=f"Keep the {len(worst)} layers with the largest errors in 8 bits: about +{more / 1e6:.1f} MB.",
        changes={"config": mixed.to_dict()} | ({"export": [export]} if is_other else {}),
        flags=" ".join([*flags, *chosen, *(["--model_export", export] if is_other else [])]),
    )


def _finer(plan: Plan, worst: Sequence[LayerPlan]) -> tuple[str, str, list[LayerPlan]] | None:
    """Return an export and a preset of 8 bits that it can hold beside the other layers, and ``worst`` with it."""
    presets = EIGHT_BITS if worst[0].input_tensors is None else EIGHT_BITS_WITH_INPUTS
    for export in dict.fromkeys((plan.main_export, ANOTHER_EXPORT)):
        exporter = EXPORTERS.get(export)
        for name in presets:
            finer = [replace(layer, config=PRESETS[name].config.global_quant_config) for layer in worst]
            if not any(exporter.refuse(layer) for layer in (*plan.layers, *finer)):
                return export, name, finer
    return None


def preset_flags(config: Config) -> list[str] | None:
    """Return the flags of a preset and its algorithms that stand for ``config``; None for any other config."""
    scheme = replace(config, algo_config=())
    name = next((each for each, preset in PRESETS.items() if preset.config == scheme), None)
    if name is None:
        return None
    for effort in EFFORTS:
        if recipe([scheme], effort) == config.algo_config:
            return ["--quant_scheme", name, "--effort", effort]
    names = ["smoothquant" if each.name == "smooth" else each.name for each in config.algo_config]
    return ["--quant_scheme", name, "--quant_algo", ",".join(names) or "none"]


def _worst(errors: Sequence[LayerError]) -> list[str]:
    """Return the layers with the largest errors of their outputs, each with those of its fused group."""
    measured = [error for error in errors if error.output_error is not None]
    groups = fused_groups(error.name for error in errors)
    names: dict[str, None] = {}
    for error in sorted(measured, key=lambda each: -(each.output_error or 0.0)):
        if len(names) >= NUM_LAYERS:
            break
        group = group_of(error.name)
        names |= dict.fromkeys(groups.get(group, [error.name]) if group else [error.name])
    return list(names)
