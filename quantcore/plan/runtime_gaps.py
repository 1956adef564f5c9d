"""Warns of results that vLLM will not load although it reads their format. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.errors import ConfigError
from quantcore.export.unread import not_in_vllm


def warn_of_unread(
    config: Config, layers: Sequence[LayerPlan], kept: Iterable[str], exports: Sequence[str]
) -> tuple[str, ...]:
    """Return a warning for each reason why vLLM will not load one of ``exports``.

    ``kept``: the names of linear layers that are not quantized. Raises ConfigError ``not_for_vllm`` instead if the
    config is ``strict``.
    """
    kept = tuple(kept)
    found = {export: not_in_vllm(export, layers, kept) for export in exports}
    faults = dict.fromkeys(f"vLLM will not load this result. {reason}" for reason in found.values() if reason)
    if faults and config.strict:
        raise ConfigError(
            next(iter(faults)),
            code="not_for_vllm",
            hint="Use one scheme for all fused layers, and exclude lm_head. Without `strict`, this is only a warning.",
            field="/strict",
        )
    return tuple(faults)
