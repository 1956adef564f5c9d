"""The AWQ format of AutoAWQ's GEMM kernels (``quant_method: awq``), for 4-bit weights from any solver.

``qweight`` int32 [in, out / 8], ``qzeros`` int32 [in / group, out / 8]: eight codes along the outputs in a word, in
the order of the kernels, starting at 0; ``scales`` [in / group, out]. AMD Quark's ``custom_mode="awq"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    is_plain,
    refuse_activations,
    refuse_everywhere,
    stored_scale_dtype,
)
from quantcore.export.importer import StoredFiles, StoredLayer, not_held
from quantcore.export.readers import Readers
from quantcore.export.words import codes_of, pack_from_zero, unpack_from_zero
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer

SLOTS = 8  # codes in a word


class AwqReaders(Readers):
    def prefers(self, layers: Sequence[LayerPlan]) -> bool:
        """Transformers 5.23 unpacks asymmetric int4 of compressed-tensors wrongly, and reads it in AWQ's layout."""
        return any(layer.weight.dtype is Dtype.uint4 for layer in layers)


class AwqExporter:
    name = "awq"
    title = "AWQ safetensors (vLLM, Transformers)"
    readers = AwqReaders("vLLM (CPU)", preference=2, in_vllm=True, transformers_package="gptqmodel")

    def refuse(self, layer: LayerPlan) -> str | None:
        weight = layer.weight
        if reason := refuse_everywhere(layer) or refuse_activations(layer):
            return reason
        if not isinstance(weight.format, IntFormat) or weight.format.bits != 4 or not is_plain(weight):
            return "it supports int4 and uint4 with plain scales"
        if weight.qscheme not in (QSchemeType.per_channel, QSchemeType.per_group):
            return "weights can be per_channel or per_group"
        if layer.out_features % SLOTS:
            return f"it packs {SLOTS} output channels per word, but {layer.out_features} is not a multiple of {SLOTS}"
        return None

    def same_everywhere(self, layer: LayerPlan) -> dict[str, object]:
        return {"group_size": _group_size(layer)}

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        (rows, groups), words = layer.num_scales, layer.out_features // SLOTS
        return {
            "qweight": TensorLayout("I32", (layer.in_features, words)),
            "qzeros": TensorLayout("I32", (groups, words)),
            "scales": TensorLayout(stored_scale_dtype(layer.weight, model_dtype), (groups, rows)),
        }

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:

        from quantcore.tensors.packing import AWQ_ORDER

        params, fmt = quantized.weight.params, layer.weight.format
        zero_point = params.zero_point_or_zeros
        return {
            "qweight": pack_from_zero(quantized.weight.codes.T, fmt, AWQ_ORDER),
            "qzeros": pack_from_zero(zero_point.T, fmt, AWQ_ORDER),
            "scales": params.scale.T,
        }

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import AWQ_ORDER
        from quantcore.tensors.qtensor import QLayer, QTensor

        fmt = layer.weight.format
        zero_point = None if layer.weight.symmetric else unpack_from_zero(tensors["qzeros"], fmt, AWQ_ORDER).T
        params = QParams(tensors["scales"].float().T, zero_point)
        return QLayer(QTensor(codes_of(tensors["qweight"], fmt, AWQ_ORDER).T, params, layer.weight))

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _group_size(layers[0]),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(kept),
        }

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "awq"

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        num_bits = quantization_config.get("bits", quantization_config.get("w_bit"))
        if quantization_config.get("version", "gemm") != "gemm" or num_bits != 4:
            raise not_held("only AWQ's gemm layout with 4 bits is supported")
        size = int(quantization_config.get("group_size", quantization_config.get("q_group_size", -1)))
        spec = QuantizationSpec(dtype=Dtype.uint4, qscheme=QSchemeType.per_group, group_size=size, symmetric=False)
        layers = {}
        for name in files.modules_with("qweight"):
            num_inputs, words = files.shape(f"{name}.qweight")
            own = files.with_scale(spec, f"{name}.scales")
            layers[name] = StoredLayer((words * SLOTS, num_inputs), QuantizationConfig(weight=own))
        return layers

    def load_hint(self, path: str) -> str:
        return f"from vllm import LLM\nllm = LLM({path!r}, quantization='awq')"


def _group_size(layer: LayerPlan) -> int:
    """Return the number of inputs that share a scale; -1 for the whole row."""
    return -1 if layer.weight.group_size is None else layer.weight.group_size


_exporter: Exporter = EXPORTERS.add("awq")(AwqExporter())
