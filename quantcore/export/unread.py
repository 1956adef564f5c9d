"""The combinations of format, scheme and model that a program is known not to load, or to load as another model.

Seen in vLLM 0.32 and Transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from quantcore.checkpoint.fused import fused_groups, is_last
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QuantizationSpec
from quantcore.export.exporter import readers_of


def not_in_vllm(export: str, layers: Sequence[LayerPlan], kept: Iterable[str]) -> str | None:
    """Return why vLLM does not load such an ``export``, as a sentence; None if no reason is known.

    ``kept``: the names of linear layers that stay in high precision.
    """
    readers = readers_of(export)
    if not readers.in_vllm:
        return None
    heads = [layer.name for layer in layers if layer.block is None and not layer.is_rounded_alone]
    if heads and not readers.vllm_reads_head:
        return f"vLLM does not read a quantized {heads[0]} in the {export} format."
    return next(differing_groups(layers, kept), None) or _odd_blocks(layers) or readers.named_apart_in_vllm(layers)


def differing_groups(layers: Sequence[LayerPlan], kept: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on every fused layer of vLLM whose parts have different schemes; ``kept`` as above."""
    planned = {layer.name: layer for layer in layers}
    for members in fused_groups((*planned, *kept)).values():
        first, *others = members
        other = next((name for name in others if _stored(planned.get(name)) != _stored(planned.get(first))), None)
        if other is not None:
            yield (
                f"vLLM fuses {first} and {other} into one layer and needs one scheme for both, but the first is "
                f"{_describe(planned.get(first))} and the second is {_describe(planned.get(other))}."
            )


def _stored(layer: LayerPlan | None) -> tuple[QuantizationSpec | None, ...] | None:
    """Return the specs of weights and inputs without what chose their scales; None for a layer that is kept."""
    if layer is None:
        return None
    return tuple(
        spec and replace(spec, observer_cls=None, scale_calculation_mode=None)
        for spec in (layer.weight, layer.input_tensors)
    )


def _describe(layer: LayerPlan | None) -> str:
    if layer is None:
        return "not quantized"
    return layer.scheme if layer.weight.symmetric else f"{layer.scheme}, asymmetric"


def _odd_blocks(layers: Sequence[LayerPlan]) -> str | None:
    """Return why vLLM does not load fp8 blocks: only the last part of a fused layer may end within a block."""
    planned = {layer.name: layer for layer in layers if layer.weight.block_size is not None}
    for group, members in fused_groups(planned).items():
        for layer in (planned[name] for name in members if not (group[1] and is_last(name))):
            block = layer.weight.block_size
            assert block is not None
            if layer.out_features % block[0]:
                return (
                    f"vLLM fuses {layer.name} with other layers, but its {layer.out_features} rows are not a "
                    f"multiple of the block's {block[0]} rows."
                )
    return None


def unread(export: str, layers: tuple[LayerPlan, ...]) -> str | None:
    """Return the known reason why Transformers 5.23 does not read such an export on a CPU; None without one."""
    readers = readers_of(export)
    if not readers.in_transformers:
        return f"The proof does not run a program that reads {export} files."
    return readers.only_on_gpus(layers) or readers.not_in_transformers(layers)
