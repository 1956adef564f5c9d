"""Fits planned layers to the formats of a job, or says why a format cannot hold them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantcore.config.layer_plan import LayerPlan, check_groups, check_super_blocks
from quantcore.config.quantization import Config
from quantcore.export import adapted, check_exports, holds_codes
from quantcore.plan.distillation import check_distillation
from quantcore.plan.runtime_gaps import warn_of_unread


def fit_to_formats(
    config: Config, layers: tuple[LayerPlan, ...], kept: list[str], exports: Sequence[str]
) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    """Return the layers as the formats ``exports`` store them, with warnings. ``kept``: names of layers left as floats.

    Raises ConfigError for layers that a format cannot hold.
    """
    warnings: tuple[str, ...] = ()
    if not any(map(holds_codes, exports)):
        layers, warnings = _without_activations(layers, exports)
    as_configured = layers
    layers, changes = adapted(layers, exports)
    check_groups(layers)
    check_super_blocks(layers)
    check_exports(layers, exports, as_configured)
    check_distillation(config, layers, exports)
    return layers, (*warnings, *changes, *warn_of_unread(config, layers, kept, exports))


def _without_activations(
    layers: tuple[LayerPlan, ...], exports: Sequence[str]
) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    """Drop the layers' activations, which none of ``exports`` holds; returns a warning if that changes any."""
    weights_only = tuple(
        replace(layer, config=replace(layer.config, input_tensors=None, output_tensors=None)) for layer in layers
    )
    num_changed = sum(after != before for after, before in zip(weights_only, layers, strict=True))
    warning = f"{', '.join(exports)} stores only weights: the activations of {num_changed} layer(s) are not quantized."
    return weights_only, (warning,) if num_changed else ()
