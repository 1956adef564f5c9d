"""Warns of layers that vLLM fuses and that a config quantizes in different ways. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.errors import ConfigError
from quantcore.export.unread import VLLM_FORMATS, differing_groups


def warn_of_fused(
    config: Config, layers: Sequence[LayerPlan], kept: Iterable[str], exports: Sequence[str]
) -> tuple[str, ...]:
    """Return a warning of fused layers whose parts differ, if one of ``exports`` is for vLLM.

    ``kept``: the names of linear layers that are not quantized. Raises ConfigError ``fused_layers_differ`` instead if
    the config is ``strict``.
    """
    differing = list(differing_groups(layers, kept)) if set(exports) & set(VLLM_FORMATS) else []
    if not differing:
        return ()
    more = f" So it is for {len(differing) - 1} more fused layer(s)." if len(differing) > 1 else ""
    fault = f"vLLM will not load this result. {differing[0]}{more}"
    remedy = "Give all layers that are fused one scheme, or exclude all of them."
    if config.strict:
        raise ConfigError(
            fault,
            code="fused_layers_differ",
            hint=f"{remedy} Without `strict` it is a warning.",
            field="/strict",
        )
    return (f"{fault} {remedy}",)
