"""Layouts of one layer's weight in compressed-tensors: three families, chosen by the spec.

numbers   int8, fp8: weight [out, in]; weight_scale [1], [out, 1] or, for blocks of fp8, [out / height, in / width]
words     integers whose inputs are not quantized: weight_packed int32 [out, in * bits / 32], code i at bits
          [i * bits, ...) of a row's words (3 bits: 32 codes in 3 words), codes shifted to start at 0; weight_scale
          [out, groups]; weight_zero_point int32 [out * bits / 32, groups]; weight_shape int64 [2]
blocks    fp4 and fp6 in weight_packed uint8 [out, in * bits / 8], the first code in the low bits, and fp8 in weight
          [out, in]; weight_scale [out, groups]: uint8, the byte of e8m0 (OCP MX), or fp8_e4m3 (NVFP4), beside
          weight_global_scale float32 [1]: the divisor of the scales

The global scale is the reciprocal of ours, chosen so that the conversion is exact (``affine.find_global_scale``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Dtype, QSchemeType, QuantizationSpec, ScaleType
from quantcore.export.exporter import Tensors, is_plain, refuse_blocks, refuse_inputs, stored_scale_dtype
from quantcore.export.words import WORD_BITS, codes_of, pack_from_zero, unpack_from_zero
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QTensor

WORD_CODE_BITS = (2, 3, 4, 8)
BLOCKS = {
    (Dtype.fp4, ScaleType.e4m3, 16): "nvfp4-pack-quantized",
    (Dtype.fp4, ScaleType.e8m0, 32): "mxfp4-pack-quantized",
    (Dtype.fp6_e2m3, ScaleType.e8m0, 32): "mxfp6-pack-quantized",
    (Dtype.fp8_e4m3, ScaleType.e8m0, 32): "mxfp8-quantized",
}
"""Format names by (element, scale, group size)."""


class Family(Protocol):
    def format_name(self, layer: LayerPlan) -> str:
        """Return the compression format in config.json."""

    def refuse(self, layer: LayerPlan) -> str | None:
        """Return why the weight cannot be stored, or its inputs not be quantized like this; see ``Exporter.refuse``."""

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]: ...
    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors: ...
    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor: ...


def family_of(layer: LayerPlan) -> Family:
    spec = layer.weight
    if spec.scale_type in (ScaleType.e8m0, ScaleType.e4m3):
        return Blocks()
    return Words() if isinstance(spec.format, IntFormat) and layer.input_tensors is None else Numbers()


class Numbers:
    def format_name(self, layer: LayerPlan) -> str:
        return "int-quantized" if isinstance(layer.weight.format, IntFormat) else "float-quantized"

    def refuse(self, layer: LayerPlan) -> str | None:
        spec = layer.weight
        if spec.dtype not in (Dtype.int8, Dtype.fp8_e4m3) or not is_plain(spec):
            return "unpacked weights are int8 or fp8_e4m3 with plain scales"
        if not spec.symmetric:
            return "weights of layers with quantized inputs must be symmetric"
        if spec.qscheme is QSchemeType.per_block:
            return refuse_blocks(layer)
        if spec.qscheme not in (QSchemeType.per_tensor, QSchemeType.per_channel):
            return "unpacked 8-bit weights can be per_tensor, per_channel or (only fp8) per_block"
        return refuse_inputs(spec, layer.input_tensors)

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec = layer.weight
        shape = (1,) if spec.qscheme is QSchemeType.per_tensor else layer.num_scales
        dtype = "I8" if isinstance(spec.format, IntFormat) else "F8_E4M3"
        scale = TensorLayout(stored_scale_dtype(spec, model_dtype), shape)
        return {"weight": TensorLayout(dtype, layer.shape), "weight_scale": scale}

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        shape = self.layout(layer, "F32")["weight_scale"].shape
        return {"weight": weight.codes, "weight_scale": weight.params.scale.reshape(shape)}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QTensor

        scale = tensors["weight_scale"].float().reshape(layer.num_scales)
        return QTensor(tensors["weight"], QParams(scale), layer.weight)


class Words:
    def format_name(self, layer: LayerPlan) -> str:
        return "pack-quantized"

    def refuse(self, layer: LayerPlan) -> str | None:
        spec = layer.weight
        bits = spec.format.bits
        if bits not in WORD_CODE_BITS or not is_plain(spec):
            return f"it packs integers of {', '.join(map(str, WORD_CODE_BITS))} bits with plain scales"
        if spec.qscheme not in (QSchemeType.per_channel, QSchemeType.per_group):
            return "weight-only integers can be per_channel or per_group"
        if layer.in_features * bits % WORD_BITS:
            return f"it packs inputs into words of 32 bits, but {layer.in_features} of {bits} bits do not fill them"
        if not spec.symmetric and layer.out_features * bits % WORD_BITS:
            return (
                f"it packs zero points into words of 32 bits, but {layer.out_features} of {bits} bits do not fill them"
            )
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec, (rows, groups) = layer.weight, layer.num_scales
        bits = spec.format.bits
        tensors = {
            "weight_packed": TensorLayout("I32", (layer.out_features, layer.in_features * bits // WORD_BITS)),
            "weight_scale": TensorLayout(stored_scale_dtype(spec, model_dtype), (rows, groups)),
            "weight_shape": TensorLayout("I64", (2,)),
        }
        if not spec.symmetric:
            tensors["weight_zero_point"] = TensorLayout("I32", (rows * bits // WORD_BITS, groups))
        return tensors

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        import torch

        fmt, params = layer.weight.format, weight.params
        tensors = {
            "weight_packed": pack_from_zero(weight.codes, fmt),
            "weight_scale": params.scale,
            "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
        }
        if params.zero_point is not None:
            tensors["weight_zero_point"] = pack_from_zero(params.zero_point.T, fmt).T
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QTensor

        fmt, zero_point = layer.weight.format, None
        if not layer.weight.symmetric:
            zero_point = unpack_from_zero(tensors["weight_zero_point"].T, fmt).T
        params = QParams(tensors["weight_scale"].float(), zero_point)
        return QTensor(codes_of(tensors["weight_packed"], fmt), params, layer.weight)


class Blocks:
    def format_name(self, layer: LayerPlan) -> str:
        return BLOCKS[_kind(layer.weight)]

    def refuse(self, layer: LayerPlan) -> str | None:
        weight, inputs = layer.weight, layer.input_tensors
        if _kind(weight) not in BLOCKS:
            return "its blocks are NVFP4, MXFP4, MXFP6 of e2m3 or MXFP8 of e4m3"
        if inputs is not None and not (inputs.is_dynamic and _kind(inputs) == _kind(weight)):
            return "inputs of such weights are either not quantized, or quantized in the same blocks at run time"
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        bits, is_mx = layer.weight.format.bits, layer.weight.scale_type is ScaleType.e8m0
        tensors = {
            self._codes_name(layer): TensorLayout("F8_E4M3", layer.shape)
            if bits == 8
            else TensorLayout("U8", (layer.out_features, layer.in_features * bits // 8)),
            "weight_scale": TensorLayout("U8" if is_mx else "F8_E4M3", layer.num_scales),
        }
        return tensors if is_mx else tensors | {"weight_global_scale": TensorLayout("F32", (1,))}

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        import torch

        from quantcore.formats.floats import encode_e8m0
        from quantcore.tensors.packing import pack

        bits, params = layer.weight.format.bits, weight.params
        codes = weight.codes if bits == 8 else pack(weight.codes, bits, dtype=torch.uint8)
        tensors = {self._codes_name(layer): codes}
        if params.global_scale is None:
            return tensors | {"weight_scale": encode_e8m0(params.scale)}
        return tensors | {
            "weight_scale": params.scale,
            "weight_global_scale": 1 / params.global_scale.reshape(1),
        }

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.formats.floats import decode_e8m0
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QTensor

        fmt, stored = layer.weight.format, tensors[self._codes_name(layer)]
        codes = stored if fmt.bits == 8 else unpack(stored, fmt)
        if layer.weight.scale_type is ScaleType.e8m0:
            return QTensor(codes, QParams(decode_e8m0(tensors["weight_scale"])), layer.weight)
        global_scale = 1 / tensors["weight_global_scale"].reshape(())
        return QTensor(codes, QParams(tensors["weight_scale"].float(), global_scale=global_scale), layer.weight)

    @staticmethod
    def _codes_name(layer: LayerPlan) -> str:
        return "weight" if layer.weight.format.bits == 8 else "weight_packed"


def _kind(spec: QuantizationSpec) -> tuple[Dtype, ScaleType, int]:
    return spec.dtype, spec.scale_type, spec.group_size or 0
