"""The compressed-tensors format, which vLLM and Transformers load.

Layout as compressed-tensors 0.20 reads it. 8-bit (``int-quantized``, ``float-quantized``): weight [out, in],
``weight_scale`` [out, 1] or [1], static ``input_scale`` [1]. Weight-only integers (``pack-quantized``): int32 words
[out, in / slots], code i at bits [i * bits, ...), codes shifted to start at 0; zero points packed along the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    is_plain,
    refuse_everywhere,
    refuse_inputs,
    stored_scale_dtype,
)
from quantcore.formats import IntFormat
from quantcore.layer import LayerPlan

if TYPE_CHECKING:
    from quantcore.qtensor import QLayer


class CompressedTensorsExporter:
    name = "compressed_tensors"
    title = "compressed-tensors safetensors (vLLM, Transformers)"

    def refuse(self, layer: LayerPlan) -> str | None:
        weight, inputs = layer.weight, layer.input_tensors
        if reason := refuse_everywhere(layer):
            return reason
        if weight.dtype not in (Dtype.int4, Dtype.uint4, Dtype.int8, Dtype.fp8_e4m3) or not is_plain(weight):
            return "its consumers read int4, uint4, int8 and fp8_e4m3 with plain scales"
        if layer.config.output_tensors is not None:
            return "scales of outputs have no place in it yet"
        if weight.format.bits < 8 and inputs is not None:
            return "4-bit weights go with unquantized inputs"
        if not _is_packed(layer):
            if weight.qscheme not in (QSchemeType.per_tensor, QSchemeType.per_channel):
                return "weights of layers with quantized inputs can be per_tensor or per_channel"
            if not weight.symmetric:
                return "weights of layers with quantized inputs must be symmetric"
            return refuse_inputs(weight, inputs)
        slots = 32 // weight.format.bits
        if weight.qscheme is QSchemeType.per_tensor:
            return "weight-only integers can be per_channel or per_group"
        if layer.in_features % slots:
            return f"it packs {slots} inputs in a word, and {layer.in_features} is not a multiple"
        if not weight.symmetric and layer.out_features % slots:
            return f"it packs {slots} zero points in a word, and {layer.out_features} rows are not a multiple"
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec, (rows, groups) = layer.weight, layer.num_scales
        scale = stored_scale_dtype(spec, model_dtype)
        if _is_packed(layer):
            slots = 32 // spec.format.bits
            tensors = {
                "weight_packed": TensorLayout("I32", (layer.out_features, layer.in_features // slots)),
                "weight_scale": TensorLayout(scale, (rows, groups)),
                "weight_shape": TensorLayout("I64", (2,)),
            }
            if not spec.symmetric:
                tensors["weight_zero_point"] = TensorLayout("I32", (rows // slots, groups))
            return tensors
        shape = (1,) if spec.qscheme is QSchemeType.per_tensor else (rows, 1)
        dtype = "I8" if isinstance(spec.format, IntFormat) else "F8_E4M3"
        tensors = {
            "weight": TensorLayout(dtype, (layer.out_features, layer.in_features)),
            "weight_scale": TensorLayout(scale, shape),
        }
        if layer.config.needs_calibration and layer.input_tensors is not None:
            tensors["input_scale"] = TensorLayout(stored_scale_dtype(layer.input_tensors, model_dtype), (1,))
            if not layer.input_tensors.symmetric:
                tensors["input_zero_point"] = TensorLayout("I8", (1,))
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer) -> Tensors:
        import torch

        from quantcore.formats.packing import pack

        weight, inputs, fmt = quantized.weight, quantized.inputs, layer.weight.format
        params = weight.params
        if _is_packed(layer):
            tensors = {
                "weight_packed": pack(weight.codes.to(torch.int32) - int(fmt.min), fmt.bits),
                "weight_scale": params.scale,
                "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
            }
            if params.zero_point is not None:
                tensors["weight_zero_point"] = pack((params.zero_point - int(fmt.min)).T, fmt.bits).T
            return tensors
        shape = self.layout(layer, "F32")["weight_scale"].shape
        tensors = {"weight": weight.codes, "weight_scale": params.scale.reshape(shape)}
        if inputs is not None:
            tensors["input_scale"] = inputs.scale.reshape(1)
            if inputs.zero_point is not None:
                tensors["input_zero_point"] = inputs.zero_point.reshape(1).to(torch.int8)
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.affine import QParams
        from quantcore.formats.packing import unpack
        from quantcore.qtensor import QLayer, QTensor

        fmt = layer.weight.format
        scale = tensors["weight_scale"].float().reshape(layer.num_scales)
        zero_point = None
        if _is_packed(layer):
            plain = IntFormat("word", fmt.bits, signed=False)
            storage = torch.int8 if fmt.signed else torch.uint8
            codes = (unpack(tensors["weight_packed"], plain).to(torch.int32) + int(fmt.min)).to(storage)
            if not layer.weight.symmetric:
                zero_point = unpack(tensors["weight_zero_point"].T, plain).T.to(torch.int32) + int(fmt.min)
        else:
            codes = tensors["weight"]
        inputs = None
        if "input_scale" in tensors:
            input_zero_point = tensors.get("input_zero_point")
            inputs = QParams(
                tensors["input_scale"].float().reshape(1, 1),
                None if input_zero_point is None else input_zero_point.to(torch.int32).reshape(1, 1),
            )
        return QLayer(QTensor(codes, QParams(scale, zero_point), layer.weight), inputs)

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        by_config: dict[QuantizationConfig, list[LayerPlan]] = {}
        for layer in layers:
            by_config.setdefault(layer.config, []).append(layer)
        groups = {
            f"group_{index}": {
                "targets": ["Linear"] if len(by_config) == 1 else [layer.name for layer in members],
                "weights": _args(members[0].weight, is_input=False),
                "input_activations": _args(members[0].input_tensors, is_input=True),
                "output_activations": None,
                "format": _format_name(members[0]),
            }
            for index, members in enumerate(by_config.values())
        }
        formats = {str(group["format"]) for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(kept),
            "kv_cache_scheme": None,
        }

    def load_hint(self, path: str) -> str:
        return f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('{path}')"


def _is_packed(layer: LayerPlan) -> bool:
    """Integer weights whose inputs stay in high precision are packed into words."""
    return isinstance(layer.weight.format, IntFormat) and layer.input_tensors is None


def _format_name(layer: LayerPlan) -> str:
    if _is_packed(layer):
        return "pack-quantized"
    return "int-quantized" if isinstance(layer.weight.format, IntFormat) else "float-quantized"


def _args(spec: QuantizationSpec | None, *, is_input: bool) -> dict[str, Any] | None:
    """The QuantizationArgs of compressed-tensors for one tensor."""
    if spec is None:
        return None
    channel = "token" if is_input else "channel"
    strategy = {QSchemeType.per_tensor: "tensor", QSchemeType.per_channel: channel, QSchemeType.per_group: "group"}
    whole_row = spec.group_size == -1
    return {
        "num_bits": spec.format.bits,
        "type": "int" if isinstance(spec.format, IntFormat) else "float",
        "strategy": "channel" if whole_row else strategy[spec.qscheme],
        "group_size": None if whole_row else spec.group_size,
        "symmetric": spec.symmetric,
        "dynamic": spec.is_dynamic,
        "observer": None if spec.is_dynamic else "minmax",
        "actorder": None,
        "block_structure": None,
    }


_exporter: Exporter = EXPORTERS.add("compressed_tensors")(CompressedTensorsExporter())
