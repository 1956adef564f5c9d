"""The combinations of format, scheme and model that a program is known not to load, or to load as another model.

Seen in vLLM 0.32 and Transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from quantcore.checkpoint.experts import is_in_stack
from quantcore.checkpoint.fused import fused_groups, is_last
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Dtype, QuantizationSpec, ScaleType
from quantcore.export.exporter import is_plain
from quantcore.export.gptq import numbers_of

TRANSFORMERS_PACKAGES = {
    "compressed_tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes", "gguf": "gguf", "fp8": None,
    "fake_quantized": None,
}  # fmt: skip
"""Formats that Transformers reads on a CPU, and the package that each of them needs as well."""
VLLM_FORMATS = ("quark", "compressed_tensors", "fp8", "gptq", "awq")
"""Formats that vLLM reads."""
_WITHOUT_HEAD = ("quark", "compressed_tensors", "fp8", "awq")
"""Formats in which vLLM does not read a quantized lm_head."""


def not_in_transformers(export: str, layers: Sequence[LayerPlan]) -> str | None:
    """Return why Transformers does not read such an ``export``, as a sentence; None if no reason is known."""
    if export != "compressed_tensors":
        return None
    if any(not layer.weight.symmetric and layer.weight.format.bits < 8 for layer in layers):
        return "Transformers does not read packed zero points of compressed-tensors."
    odd = [layer for layer in layers if is_in_stack(layer.name) and not _is_read_as_expert(layer.weight)]
    if odd:
        return (
            f"Transformers does not decode experts that are {odd[0].scheme} in compressed-tensors: it fails, or loads"
            " them as other weights without an error."
        )
    return None


def _is_read_as_expert(weight: QuantizationSpec) -> bool:
    """Return whether Transformers reads an expert with such a weight.

    See ``CompressedTensorsDequantize`` in transformers/integrations/compressed_tensors.py.
    """
    is_mxfp4 = weight.dtype is Dtype.fp4 and weight.scale_type is ScaleType.e8m0
    return is_mxfp4 or (is_plain(weight) and weight.dtype in (Dtype.fp8_e4m3, Dtype.int4) and weight.block_size is None)


def not_in_vllm(export: str, layers: Sequence[LayerPlan], kept: Iterable[str]) -> str | None:
    """Return why vLLM does not load such an ``export``, as a sentence; None if no reason is known.

    ``kept``: the names of linear layers that stay in high precision.
    """
    if export not in VLLM_FORMATS:
        return None
    heads = [layer.name for layer in layers if layer.block is None and not layer.is_beside]
    if heads and export in _WITHOUT_HEAD:
        return f"vLLM does not read a quantized {heads[0]} in the {export} format."
    return next(differing_groups(layers, kept), None) or _odd_blocks(layers) or _named_apart(export, layers)


def differing_groups(layers: Sequence[LayerPlan], kept: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on every fused layer of vLLM whose parts have different schemes; ``kept`` as above."""
    planned = {layer.name: layer for layer in layers}
    for members in fused_groups((*planned, *kept)).values():
        first, *others = members
        other = next((name for name in others if _stored(planned.get(name)) != _stored(planned.get(first))), None)
        if other is not None:
            yield (
                f"vLLM computes {first} and {other} in one layer and needs one scheme for both, but the first"
                f" is {_describe(planned.get(first))} and the second is {_describe(planned.get(other))}."
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
                    f"vLLM fuses {layer.name} with other layers, for which its {layer.out_features} rows would have to"
                    f" be a multiple of the {block[0]} rows of a block."
                )
    return None


def _named_apart(export: str, layers: Sequence[LayerPlan]) -> str | None:
    """Return why vLLM does not read ``dynamic`` of GPTQ: it looks for the name of the fused layer there."""
    if export != "gptq":
        return None
    usual = numbers_of(next((layer for layer in layers if layer.chosen_by == "global_quant_config"), layers[0]))
    named = [layer.name for layer in layers if numbers_of(layer) != usual]
    odd = next((members[0] for members in fused_groups(named).values()), None)
    return odd and (
        f"vLLM looks in `dynamic` of a GPTQ file for the layer that it fuses from {odd} and others, and finds each of"
        " them alone."
    )


def unread(export: str, layers: tuple[LayerPlan, ...]) -> str | None:
    """Return the known reason why Transformers 5.23 does not read such an export on a CPU; None without one."""
    if export not in TRANSFORMERS_PACKAGES:
        return f"No program that reads {export} files runs in the proof."
    if export == "fp8" and any(layer.weight.block_size is None for layer in layers):
        return "Without a GPU Transformers reads fp8 files with weights in blocks alone."
    return not_in_transformers(export, layers)
