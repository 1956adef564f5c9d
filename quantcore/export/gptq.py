"""The GPTQ format of AutoGPTQ and GPTQModel (``quant_method: gptq``), for weights from any solver.

Words of 32 bits hold codes of 2, 3, 4 or 8 bits that start at 0: ``qweight`` int32 [in * bits / 32, out], packed along
the inputs; ``qzeros`` int32 [groups, out * bits / 32], packed along the outputs; ``scales`` [groups, out]; ``g_idx``
int32 [in], the group of each input. The first version of the format stores zero points minus one, so it cannot store 0
and holds only symmetric weights, whose zero point is in the middle. ``gptq_v2`` stores zero points unchanged.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.fused import fused_groups
from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    draft_parts,
    draft_pattern,
    draft_patterns,
    is_plain,
    refuse_activations,
    refuse_everywhere,
    stored_scale_dtype,
)
from quantcore.export.importer import StoredFiles, StoredLayer, matches, not_held
from quantcore.export.readers import Readers
from quantcore.export.words import WORD_BITS, codes_of, pack_from_zero, unpack_from_zero
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer

BITS = (2, 3, 4, 8)


class GptqReaders(Readers):
    def named_apart_in_vllm(self, layers: Sequence[LayerPlan]) -> str | None:
        """vLLM looks for the name of the fused layer in ``dynamic``."""
        usual = numbers_of(next((layer for layer in layers if layer.chosen_by == "global_quant_config"), layers[0]))
        named = [layer.name for layer in layers if numbers_of(layer) != usual]
        odd = next((members[0] for members in fused_groups(named).values()), None)
        return odd and (
            f"vLLM looks up fused layers in `dynamic` of a GPTQ file, which lists {odd} and others separately."
        )


@dataclass(frozen=True)
class GptqExporter:
    name: str
    title: str
    version: int
    readers = GptqReaders(
        "GPTQModel", preference=6, in_vllm=True, vllm_reads_head=True, transformers_package="gptqmodel"
    )

    def refuse(self, layer: LayerPlan) -> str | None:
        weight = layer.weight
        if reason := refuse_everywhere(layer) or refuse_activations(layer):
            return reason
        if not isinstance(weight.format, IntFormat) or weight.format.bits not in BITS or not is_plain(weight):
            return f"it supports integers of {', '.join(map(str, BITS))} bits with plain scales"
        if weight.qscheme not in (QSchemeType.per_channel, QSchemeType.per_group):
            return "weights can be per_channel or per_group"
        if self.version == 1 and not weight.symmetric:
            return "version 1 cannot represent every zero point; use gptq_v2 or symmetric weights"
        bits = weight.format.bits
        for what, length in (("inputs", layer.in_features), ("output channels", layer.out_features)):
            if length * bits % WORD_BITS:
                return f"it packs {what} into words of 32 bits, but {length} of {bits} bits do not fill them"
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        (rows, groups), bits = layer.num_scales, layer.weight.format.bits
        return {
            "qweight": TensorLayout("I32", (layer.in_features * bits // WORD_BITS, rows)),
            "qzeros": TensorLayout("I32", (groups, rows * bits // WORD_BITS)),
            "scales": TensorLayout(stored_scale_dtype(layer.weight, model_dtype), (groups, rows)),
            "g_idx": TensorLayout("I32", (layer.in_features,)),
        }

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        params, fmt = quantized.weight.params, layer.weight.format
        zero_point = params.zero_point_or_zeros
        return {
            "qweight": pack_from_zero(quantized.weight.codes, fmt).T,
            "qzeros": pack_from_zero(zero_point.T - self._less, fmt),
            "scales": params.scale.T,
            "g_idx": torch.arange(layer.in_features, dtype=torch.int32) // layer.group_size,
        }

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QLayer, QTensor

        fmt = layer.weight.format
        zero_point = unpack_from_zero(tensors["qzeros"], fmt).T + self._less
        params = QParams(tensors["scales"].float().T, None if layer.weight.symmetric else zero_point)
        return QLayer(QTensor(codes_of(tensors["qweight"].T, fmt), params, layer.weight))

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        usual = _usual(config, layers)
        others = {
            f"+:^{re.escape(own.name)}$": numbers_of(own) for own in layers if numbers_of(own) != numbers_of(usual)
        }
        return {
            "quant_method": "gptq",
            **numbers_of(usual),
            "desc_act": False,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "lm_head": any(layer.block is None and not layer.is_rounded_alone for layer in layers),
            "dynamic": others
            | {f"-:^{re.escape(name)}$": {} for name in kept}
            | {f"-:{pattern}": {} for pattern in draft_patterns(layers, kept)}
            | {f"+:{draft_pattern(part)}": numbers_of(own) for part, own in draft_parts(layers).items()},
        }

    def matches(self, config: Mapping[str, Any]) -> bool:
        version = 2 if config.get("checkpoint_format") == "gptq_v2" else 1
        return config.get("quant_method") == "gptq" and version == self.version

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        return {name: _stored_layer(name, quantization_config, files) for name in files.modules_with("qweight")}

    def load_hint(self, path: str) -> str:
        return f"from gptqmodel import GPTQModel\nmodel = GPTQModel.load({path!r})"

    @property
    def _less(self) -> int:
        """The number that is subtracted from a zero point before it is stored."""
        return 1 if self.version == 1 else 0


def numbers_of(layer: LayerPlan) -> dict[str, Any]:
    """Return the settings of a layer in ``quantization_config``, at its top or in ``dynamic``."""
    weight = layer.weight
    is_grouped = weight.qscheme is QSchemeType.per_group
    return {"bits": weight.format.bits, "group_size": weight.group_size if is_grouped else -1, "sym": weight.symmetric}


def _usual(config: Config, layers: tuple[LayerPlan, ...]) -> LayerPlan:
    """Return a layer with the global config, or the first layer if there is none."""
    return next((layer for layer in layers if layer.config.weight == config.global_quant_config.weight), layers[0])


def _stored_layer(name: str, quantization_config: Mapping[str, Any], files: StoredFiles) -> StoredLayer:
    own = {**quantization_config, **_dynamic(name, quantization_config)}
    bits, group_size, symmetric = int(own["bits"]), int(own["group_size"]), bool(own.get("sym", True))
    rows, columns = files.shape(f"{name}.qweight")
    num_inputs = rows * WORD_BITS // bits
    group = num_inputs if group_size == -1 else group_size
    index = f"{name}.g_idx"
    if index in files.tensors and files.read_bytes(index) != _groups_in_order(num_inputs, group):
        raise not_held(f"the groups of {name} are spread over its inputs (desc_act without static groups)")
    dtype = f"int{bits}" if symmetric or bits == 3 else f"uint{bits}"
    spec = QuantizationSpec(
        dtype=Dtype(dtype), qscheme=QSchemeType.per_group, group_size=group_size, symmetric=symmetric
    )
    spec = files.with_scale(spec, f"{name}.scales")
    return StoredLayer((columns, num_inputs), QuantizationConfig(weight=spec))


@cache
def _groups_in_order(num_inputs: int, group: int) -> bytes:
    """Return the bytes of ``g_idx`` for contiguous groups."""
    return array("i", (index // group for index in range(num_inputs))).tobytes()


def _dynamic(name: str, quantization_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the overrides of one layer in ``dynamic``: ``{"+:pattern": {"bits": 8}}``."""
    for pattern, own in (quantization_config.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), name):
            return dict(own)
    return {}


_v1: Exporter = EXPORTERS.add("gptq")(GptqExporter("gptq", "GPTQ safetensors (vLLM, GPTQModel)", version=1))
_v2: Exporter = EXPORTERS.add("gptq_v2")(
    GptqExporter("gptq_v2", "GPTQ safetensors, version 2: also asymmetric weights (GPTQModel)", version=2)
)
