"""ONNX language models: a graph with a key-value cache for ONNX Runtime, and the tensors in a file beside it.

Weights of 4 bits are read by ``com.microsoft.MatMulNBits``: ``weight_codes`` uint8 [out, groups, group / 2], the even
code in the low half, codes from 0; ``weight_scale`` [out, groups]; ``weight_zero_point`` uint8 [out, groups / 2], for
asymmetric weights. Weights of 8 bits are read by DequantizeLinear in front of a MatMul: ``weight_codes`` [in, out],
scale and zero point a scalar, [out], or [groups, out]. Scales are float32, like the graph's arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from quantcore.checkpoint.blocks import tower_configs
from quantcore.checkpoint.experts import EXPERT
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.onnx_headers import FILE_NAME, QUANT_METHOD, is_computed
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    Config,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    ZeroPointType,
)
from quantcore.config.spec import RoundType
from quantcore.errors import ConfigError
from quantcore.export.exporter import EXPORTERS, Container, Exporter, Tensors, is_plain, refuse_everywhere
from quantcore.export.importer import StoredFiles, StoredLayer
from quantcore.export.readers import Readers

if TYPE_CHECKING:
    from quantcore.tensors.affine import QParams
    from quantcore.tensors.qtensor import QLayer

ELEMENT_TYPES = {
    "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "fp8_e4m3": 17, "fp8_e4m3fnuz": 18, "fp8_e5m2": 19, "uint4": 21,
    "int4": 22,
}  # fmt: skip
"""ONNX's numbers for its element types, by our names."""

BYTES = {"int8": "I8", "uint8": "U8", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
"""Dtypes with 8 bits, for weights and activations, and their storage types."""

BLOCKS = (16, 32, 64, 128, 256)
"""Group sizes (inputs that share a scale of 4-bit codes) for which ONNX Runtime has kernels."""


class OnnxExporter:
    name = "onnx"
    title = "ONNX (ONNX Runtime)"
    readers = Readers("ONNX Runtime", preference=6, main_reads_all=True)
    holds_tokenizer = False
    can_be_split = False
    file_module = "quantcore.engine.containers.onnx"

    def refuse(self, layer: LayerPlan) -> str | None:
        weight = layer.weight
        if EXPERT.match(layer.name):
            return "experts are chosen at run time, but a graph always runs the same nodes"
        if reason := refuse_everywhere(layer) or _refuse_weight(layer, weight):
            return reason
        for what, spec in (("inputs", layer.input_tensors), ("outputs", layer.config.output_tensors)):
            if spec is None:
                continue
            if reason := fault_of(spec) or activation_fault(spec):
                return f"{reason} ({what})"
            if spec.dtype.value not in BYTES:
                return f"quantized {what} are one of {', '.join(BYTES)}"
            if spec.is_static and spec.qscheme is not QSchemeType.per_tensor:
                return f"static {what} have one scale per tensor"
        return None

    def adapt(self, layers: tuple[LayerPlan, ...]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
        return layers, ()

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        weight, (rows, groups) = layer.weight, layer.num_scales
        if weight.format.bits == 4:
            scales: tuple[int, ...] = (rows, groups)
            zeros = TensorLayout("U8", (rows, (groups + 1) // 2))
            codes = TensorLayout("U8", (rows, groups, layer.group_size // 2))
        else:
            scales = _scale_shape(layer)
            zeros = TensorLayout(BYTES[weight.dtype.value], scales)
            codes = TensorLayout(BYTES[weight.dtype.value], (layer.in_features, layer.out_features))
        tensors = {"weight_codes": codes, "weight_scale": TensorLayout("F32", scales)}
        if not weight.symmetric:
            tensors["weight_zero_point"] = zeros
        for what, spec in (("input", layer.input_tensors), ("output", layer.config.output_tensors)):
            if spec is not None and spec.is_static:
                tensors[f"{what}_scale"] = TensorLayout("F32", ())
                if spec.format.zero_point_ok:
                    tensors[f"{what}_zero_point"] = TensorLayout(BYTES[spec.dtype.value], ())
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        from quantcore.tensors.packing import pack

        codes, params = quantized.weight.codes, quantized.weight.params
        zero_point = params.zero_point
        if layer.weight.format.bits == 4:
            lowest = int(layer.weight.format.min)
            codes = pack(codes - lowest, 4, dtype=torch.uint8).reshape(*layer.num_scales, -1)
            tensors = {"weight_codes": codes, "weight_scale": params.scale}
            if zero_point is not None:
                tensors["weight_zero_point"] = pack(zero_point - lowest, 4, dtype=torch.uint8)
        else:
            shape = _scale_shape(layer)
            tensors = {"weight_codes": codes.T, "weight_scale": params.scale.T.reshape(shape)}
            if zero_point is not None:
                tensors["weight_zero_point"] = zero_point.T.reshape(shape)
        layout = self.layout(layer, model_dtype)
        for what, learned in (("input", quantized.inputs), ("output", quantized.outputs)):
            if learned is not None:
                tensors[f"{what}_scale"] = learned.scale.reshape(())
                if f"{what}_zero_point" in layout:
                    tensors[f"{what}_zero_point"] = learned.zero_point_or_zeros.reshape(())
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.formats import IntFormat
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QLayer, QTensor

        spec, (rows, groups) = layer.weight, layer.num_scales
        codes, zero_point = tensors["weight_codes"], tensors.get("weight_zero_point")
        if spec.format.bits == 4:
            byte, lowest, storage = IntFormat("word", 4, signed=False), int(spec.format.min), spec.format.storage
            codes = unpack(codes.reshape(rows, -1), byte).to(getattr(torch, storage)) + lowest
            if zero_point is not None:
                zero_point = unpack(zero_point, byte, length=groups).to(torch.int32) + lowest
            scale = tensors["weight_scale"]
        else:
            codes, scale = codes.T.contiguous(), tensors["weight_scale"].reshape(groups, rows).T
            zero_point = None if zero_point is None else zero_point.to(torch.int32).reshape(groups, rows).T
        return QLayer(
            QTensor(codes, QParams(scale, zero_point), spec),
            _learned("input", layer.input_tensors, tensors),
            _learned("output", layer.config.output_tensors, tensors),
        )

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        """Describe how each layer is quantized, which only the graph shows: ``{"groups": [{"config", "layers"}]}``."""
        groups: dict[QuantizationConfig, list[str]] = {}
        for layer in layers:
            groups.setdefault(layer.config, []).append(layer.name)
        described = [{"config": own.to_dict(), "layers": names} for own, names in groups.items()]
        return {"quant_method": QUANT_METHOD, "groups": described}

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == QUANT_METHOD

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        layers = {}
        for group in quantization_config["groups"]:
            config = TypeAdapter(QuantizationConfig).validate_python(group["config"])
            for name in group["layers"]:
                layers[name] = StoredLayer(_weight_shape(config, files.shape(f"{name}.weight_codes")), config)
        return layers

    def load_hint(self, path: str) -> str:
        return f"import onnxruntime\nsession = onnxruntime.InferenceSession({f'{path}/{FILE_NAME}'!r})"

    def float_layout(self, name: str, tensor: TensorHeader, model_config: Mapping[str, Any]) -> TensorLayout | None:
        return None if is_computed(name) else TensorLayout(tensor.dtype, tensor.shape)

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        if towers := tower_configs(model_config):
            raise ConfigError(
                f"An onnx file would contain only the language model, without the parts of {', '.join(towers)}.",
                code="incompatible_export",
                hint="Use another format.",
            )
        experts = [name for name in layouts if ".experts." in name]
        if experts:
            raise ConfigError(
                f"The onnx format cannot store a mixture of experts (first '{experts[0]}'): experts are chosen at "
                "run time, but a graph always runs the same nodes.",
                code="incompatible_export",
                hint="Use another format.",
                field="/export",
            )


def fault_of(spec: QuantizationSpec | None) -> str | None:
    """Return why no node of ONNX can hold codes of ``spec``, as the end of a sentence; None if one can."""
    if spec is None or not spec.format.scaled:
        return None
    if spec.dtype.value not in ELEMENT_TYPES:
        return f"its element types are {', '.join(ELEMENT_TYPES)}"
    if spec.over is not None or spec.scale_type is ScaleType.e4m3:
        return "it has one scale per value, not two"
    if spec.zero_point_type is ZeroPointType.float32:
        return "its zero points are codes: zero_point_type int32"
    return None


def activation_fault(spec: QuantizationSpec | None) -> str | None:
    """Return why ONNX cannot quantize an activation to ``spec`` at run time; None if it can."""
    if spec is None or not spec.format.scaled:
        return None
    if spec.round_method is not RoundType.half_even and spec.format.zero_point_ok:
        return "it rounds half to even"
    if spec.outlier_threshold is not None:
        return "it cannot exclude features at run time"
    if spec.is_dynamic and spec.scale_type in (ScaleType.e8m0, ScaleType.pof2):
        return "it cannot compute powers of two at run time"
    return None


def _refuse_weight(layer: LayerPlan, weight: QuantizationSpec) -> str | None:
    if reason := fault_of(weight):
        return reason
    if weight.format.bits == 4:
        if not is_plain(weight) or weight.qscheme not in (QSchemeType.per_group, QSchemeType.per_channel):
            return "4-bit weights are per_group with plain scales"
        if layer.group_size not in BLOCKS:
            return f"4-bit weights have groups of {', '.join(map(str, BLOCKS))} inputs, not {layer.group_size}"
        return None
    if weight.dtype.value not in BYTES or not is_plain(weight):
        return f"weights are int4 or uint4 in groups, or one of {', '.join(BYTES)} with plain scales"
    if weight.qscheme is QSchemeType.per_block:
        return "its blocks are groups of inputs, not rows and columns"
    if weight.qscheme is QSchemeType.per_group and weight.format.zero_point_ok and layer.input_tensors is not None:
        return "ONNX Runtime has no kernel for 8-bit inputs and 8-bit weights in groups: use per_channel weights"
    return None


def _scale_shape(layer: LayerPlan) -> tuple[int, ...]:
    """Return the shape of the scales of an 8-bit weight [in, out]."""
    rows, groups = layer.num_scales
    if layer.weight.qscheme is QSchemeType.per_tensor:
        return ()
    return (rows,) if layer.weight.qscheme is QSchemeType.per_channel else (groups, rows)


def _weight_shape(config: QuantizationConfig, codes: tuple[int, ...]) -> tuple[int, int]:
    """Return [out, in] of a weight whose codes are stored in the shape ``codes``."""
    assert config.weight is not None
    if config.weight.format.bits == 4:
        rows, groups, size = codes
        return rows, groups * size * 2
    num_inputs, rows = codes
    return rows, num_inputs


def _learned(what: str, spec: QuantizationSpec | None, tensors: Tensors) -> QParams | None:
    import torch

    from quantcore.tensors.affine import QParams

    if spec is None or not spec.is_static:
        return None
    zero_point = None if spec.symmetric else tensors[f"{what}_zero_point"].to(torch.int32).reshape(1, 1)
    return QParams(tensors[f"{what}_scale"].reshape(1, 1), zero_point)


_onnx = OnnxExporter()
_container: Container = _onnx
_exporter: Exporter = EXPORTERS.add("onnx")(_onnx)
