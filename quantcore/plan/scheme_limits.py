"""Limits of the quality gates for each scheme, set from measurements (docs/benchmarks.md)."""

from __future__ import annotations

from dataclasses import dataclass

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QSchemeType
from quantcore.plan.planner import Plan


@dataclass(frozen=True)
class SchemeLimits:
    """The limits of a scheme: upper ones of ``perplexity_ratio`` and ``kl_mean`` (nats per token), and lower ones.

    Lower limits are those of ``top1_agreement`` and ``sqnr_db`` (of the worst layer's weight).
    """

    scheme: str
    perplexity_ratio: float
    kl_mean: float
    top1_agreement: float
    sqnr_db: float


LIMITS = (
    SchemeLimits("8-bit weights", 1.04, 0.035, 0.89, 26.0),
    SchemeLimits("8-bit weights and activations", 1.07, 0.075, 0.85, 26.0),
    SchemeLimits("5- and 6-bit weights", 1.15, 0.15, 0.80, 20.0),
    SchemeLimits("4-bit weights in groups", 1.60, 0.60, 0.60, 14.0),
    SchemeLimits("4-bit weights with one scale a channel", 2.70, 1.40, 0.45, 9.0),
    SchemeLimits("4-bit weights and activations", 6.00, 2.50, 0.25, 13.0),
    SchemeLimits("fewer than 4 bits", 20.0, 4.00, 0.10, 3.0),
)
"""Limits from the strictest to the loosest; the loosest one of its layers applies to a result."""


def limits_of(plan: Plan) -> SchemeLimits:
    """Return the limits of the coarsest scheme in the plan."""
    return LIMITS[max(map(_scheme, plan.layers))]


def _scheme(layer: LayerPlan) -> int:
    """Return the layer's index in ``LIMITS``."""
    weight, inputs = layer.weight, layer.input_tensors
    bits = weight.format.bits
    input_bits = 16 if inputs is None or inputs.outlier_threshold is not None else inputs.format.bits
    if bits < 4:
        return 6
    if input_bits < 8:
        return 5
    if bits == 4:
        return 3 if weight.qscheme is QSchemeType.per_group and (layer.group_size <= 128) else 4
    if bits < 8:
        return 2
    return 1 if input_bits <= 8 else 0
