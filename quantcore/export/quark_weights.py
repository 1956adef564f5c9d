"""Layouts of one layer's weight in AMD Quark's format: five families, chosen by the spec.

bytes    int8, fp8            weight [out, in]; weight_scale [] or [out]; ints also weight_zero_point
words    int4, uint4 groups   weight int32 [in, out / 8], eight codes along the output in AWQ order;
                              weight_scale [in / group, out]; weight_zero_point packed like the weight
blocks   fp4, fp6, fp8 with e8m0 scales in groups of 32 (OCP MX); fp4 in groups of 16 with e4m3 scales (NVFP4)
                              weight uint8 [out, in * bits / 8] (fp8: [out, in]); weight_scale [out, in / group]:
                              the byte of e8m0, or fp8; NVFP4 also weight_scale_2 [], the scale of the scales
int blocks  int8 with e8m0 scales in groups of 32 (MXINT8)
                              weight int8 [in, out]; weight_scale uint8 [in / 32, out], the byte of e8m0;
                              weight_zero_point int8 [in / 32, out], zeros. Quark writes no MXINT8; its importer reads
                              this as 8-bit groups whose scales are powers of two.
stages   int4 over fp8        weight int32 [out, in / 8]; weight_scale [] of the fp8 stage;
                              weight_scale_2 [out], weight_zero_point_2 [out / 8] of the int4 stage
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QSchemeType, QuantizationSpec, ScaleType
from quantcore.export.exporter import Tensors, stored_scale_dtype
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QTensor


class Family(Protocol):
    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]: ...
    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors: ...
    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor: ...


def family_of(layer: LayerPlan) -> Family:
    """Return the family of a layer that the exporter has not refused."""
    spec = layer.weight
    if spec.over is not None:
        return Stages()
    if is_mxint8(spec):
        return IntBlocks()
    if spec.scale_type in (ScaleType.e8m0, ScaleType.e4m3):
        return Blocks()
    return Words() if spec.format.bits == 4 else Bytes()


def is_mxint8(spec: QuantizationSpec) -> bool:
    return spec.scale_type is ScaleType.e8m0 and isinstance(spec.format, IntFormat)


def weight_shape(spec: QuantizationSpec, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Return [out, in] of a weight whose tensor ``weight`` has the shape ``stored``: the inverse of ``layout``."""
    if spec.over is not None:
        return stored[0], stored[1] * 8
    if is_mxint8(spec):
        return stored[1], stored[0]
    if spec.scale_type in (ScaleType.e8m0, ScaleType.e4m3):
        return stored[0], stored[1] * 8 // spec.format.bits
    return (stored[1] * 8, stored[0]) if spec.format.bits == 4 else stored


class Bytes:
    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec = layer.weight
        per_row = () if spec.qscheme is QSchemeType.per_tensor else (layer.out_features,)
        is_int = isinstance(spec.format, IntFormat)
        tensors = {
            "weight": TensorLayout("I8" if is_int else "F8_E4M3", layer.shape),
            "weight_scale": TensorLayout(stored_scale_dtype(spec, model_dtype), per_row),
        }
        return tensors | ({"weight_zero_point": TensorLayout("I8", per_row)} if is_int else {})

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        import torch

        shape = self.layout(layer, "F32")["weight_scale"].shape
        tensors = {"weight": weight.codes, "weight_scale": weight.params.scale.reshape(shape)}
        if isinstance(layer.weight.format, IntFormat):
            tensors["weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QTensor

        scale = tensors["weight_scale"].float().reshape(layer.num_scales)
        return QTensor(tensors["weight"], QParams(scale), layer.weight)


class Words:
    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        rows, groups = layer.num_scales
        words = layer.out_features // 8
        return {
            "weight": TensorLayout("I32", (layer.in_features, words)),
            "weight_scale": TensorLayout(stored_scale_dtype(layer.weight, model_dtype), (groups, rows)),
            "weight_zero_point": TensorLayout("I32", (groups, words)),
        }

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:

        from quantcore.tensors.packing import AWQ_ORDER, pack

        params = weight.params
        zero_point = params.zero_point_or_zeros
        return {
            "weight": pack(weight.codes.T, 4, AWQ_ORDER),
            "weight_scale": params.scale.T,
            "weight_zero_point": pack(zero_point.T, 4, AWQ_ORDER),
        }

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import AWQ_ORDER, unpack
        from quantcore.tensors.qtensor import QTensor

        zero_point = unpack(tensors["weight_zero_point"], layer.weight.format, AWQ_ORDER).T.to(torch.int32)
        return QTensor(
            unpack(tensors["weight"], layer.weight.format, AWQ_ORDER).T,
            QParams(tensors["weight_scale"].float().T, None if layer.weight.symmetric else zero_point),
            layer.weight,
        )


class Blocks:
    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec = layer.weight
        if spec.format.bits == 8:
            weight = TensorLayout({"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}[spec.dtype.value], layer.shape)
        else:
            weight = TensorLayout("U8", (layer.out_features, layer.in_features * spec.format.bits // 8))
        is_mx = spec.scale_type is ScaleType.e8m0
        tensors = {"weight": weight, "weight_scale": TensorLayout("U8" if is_mx else "F8_E4M3", layer.num_scales)}
        return tensors | ({} if is_mx else {"weight_scale_2": TensorLayout("F32", ())})

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        import torch

        from quantcore.formats.floats import encode_e8m0
        from quantcore.tensors.packing import pack

        bits, params = layer.weight.format.bits, weight.params
        codes = weight.codes if bits == 8 else pack(weight.codes, bits, dtype=torch.uint8)
        if params.global_scale is None:
            return {"weight": codes, "weight_scale": encode_e8m0(params.scale)}
        return {"weight": codes, "weight_scale": params.scale, "weight_scale_2": params.global_scale.reshape(())}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.formats.floats import decode_e8m0
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QTensor

        fmt, scale = layer.weight.format, tensors["weight_scale"]
        codes = tensors["weight"] if fmt.bits == 8 else unpack(tensors["weight"], fmt)
        if "weight_scale_2" in tensors:
            return QTensor(codes, QParams(scale.float(), global_scale=tensors["weight_scale_2"]), layer.weight)
        return QTensor(codes, QParams(decode_e8m0(scale)), layer.weight)


class IntBlocks:
    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        scales = tuple(reversed(layer.num_scales))
        return {
            "weight": TensorLayout("I8", (layer.in_features, layer.out_features)),
            "weight_scale": TensorLayout("U8", scales),
            "weight_zero_point": TensorLayout("I8", scales),
        }

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        import torch

        from quantcore.formats.floats import encode_e8m0

        scale = encode_e8m0(weight.params.scale).T
        zeros = torch.zeros(scale.shape, dtype=torch.int8)
        return {"weight": weight.codes.T, "weight_scale": scale, "weight_zero_point": zeros}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.formats.floats import decode_e8m0
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QTensor

        return QTensor(tensors["weight"].T, QParams(decode_e8m0(tensors["weight_scale"]).T), layer.weight)


class Stages:
    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec = layer.weight
        assert spec.over is not None
        return {
            "weight": TensorLayout("I32", (layer.out_features, layer.in_features // 8)),
            "weight_scale": TensorLayout("F32", ()),
            "weight_scale_2": TensorLayout(stored_scale_dtype(spec, model_dtype), (layer.out_features,)),
            "weight_zero_point_2": TensorLayout("I32", (layer.out_features // 8,)),
        }

    def encode(self, layer: LayerPlan, weight: QTensor) -> Tensors:
        import torch

        from quantcore.tensors.packing import AWQ_ORDER, pack

        assert weight.params.global_scale is not None
        return {
            "weight": pack(weight.codes, 4, AWQ_ORDER),
            "weight_scale": weight.params.global_scale.reshape(()),
            "weight_scale_2": weight.params.scale.flatten(),
            "weight_zero_point_2": torch.zeros(layer.out_features // 8, dtype=torch.int32),
        }

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QTensor:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import AWQ_ORDER, unpack
        from quantcore.tensors.qtensor import QTensor

        scale = tensors["weight_scale_2"].float().unsqueeze(1)
        params = QParams(scale, global_scale=tensors["weight_scale"])
        return QTensor(unpack(tensors["weight"], layer.weight.format, AWQ_ORDER), params, layer.weight)
