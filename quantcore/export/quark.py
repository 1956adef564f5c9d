"""The checkpoint format of AMD Quark, which vLLM loads with ``quantization='quark'``.

Layout as Quark 0.13 writes it: 8-bit weights [out, in] with ``weight_scale`` [] or [out]; 4-bit weights transposed,
int32 [in, out / 8] with eight codes along the output in AWQ order ("reorder"), scales [in / group, out] and zero points
packed like the weights; static inputs as scalars. Signed 4-bit codes are two's complement.
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

QUARK_VERSION = "0.13"


class QuarkExporter:
    name = "quark"
    title = "AMD Quark safetensors (vLLM: quantization='quark')"

    def refuse(self, layer: LayerPlan) -> str | None:
        weight, inputs = layer.weight, layer.input_tensors
        if reason := refuse_everywhere(layer):
            return reason
        if weight.dtype not in (Dtype.int4, Dtype.uint4, Dtype.int8, Dtype.fp8_e4m3) or not is_plain(weight):
            return "its consumers read int4, uint4, int8 and fp8_e4m3 with plain scales"
        if weight.format.bits == 4:
            if weight.qscheme is not QSchemeType.per_group or weight.group_size == -1:
                return "4-bit weights need qscheme per_group with a group_size above 0"
            if inputs is not None:
                return "4-bit weights go with unquantized inputs"
            if layer.out_features % 8:
                return f"it packs 8 output channels in a word, and {layer.out_features} is not a multiple of 8"
            return None
        if weight.qscheme not in (QSchemeType.per_tensor, QSchemeType.per_channel):
            return "8-bit weights can be per_tensor or per_channel"
        if not weight.symmetric:
            return "8-bit weights must be symmetric"
        return refuse_inputs(weight, inputs)

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec, (rows, groups) = layer.weight, layer.num_scales
        scale = stored_scale_dtype(spec, model_dtype)
        if spec.format.bits == 4:
            words = layer.out_features // 8
            return {
                "weight": TensorLayout("I32", (layer.in_features, words)),
                "weight_scale": TensorLayout(scale, (groups, rows)),
                "weight_zero_point": TensorLayout("I32", (groups, words)),
            }
        per_row = () if rows == 1 and spec.qscheme is QSchemeType.per_tensor else (rows,)
        is_int = isinstance(spec.format, IntFormat)
        tensors = {
            "weight": TensorLayout("I8" if is_int else "F8_E4M3", (layer.out_features, layer.in_features)),
            "weight_scale": TensorLayout(scale, per_row),
        }
        if is_int:
            tensors["weight_zero_point"] = TensorLayout("I8", per_row)
        return tensors | self._activation_layout(layer, model_dtype)

    @staticmethod
    def _activation_layout(layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        tensors = {}
        for name, spec in (("input", layer.config.input_tensors), ("output", layer.config.output_tensors)):
            if spec is not None and spec.is_static:
                tensors[f"{name}_scale"] = TensorLayout(stored_scale_dtype(spec, model_dtype), ())
                if isinstance(spec.format, IntFormat):
                    tensors[f"{name}_zero_point"] = TensorLayout("I8", ())
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer) -> Tensors:
        import torch

        from quantcore.formats.packing import AWQ_ORDER, pack

        weight, params = quantized.weight, quantized.weight.params
        zero_point = (
            torch.zeros_like(params.scale, dtype=torch.int32) if params.zero_point is None else params.zero_point
        )
        if layer.weight.format.bits == 4:
            tensors = {
                "weight": pack(weight.codes.T, 4, AWQ_ORDER),
                "weight_scale": params.scale.T,
                "weight_zero_point": pack(zero_point.T, 4, AWQ_ORDER),
            }
        else:
            shape = self.layout(layer, "F32")["weight_scale"].shape
            tensors = {"weight": weight.codes, "weight_scale": params.scale.reshape(shape)}
            if isinstance(layer.weight.format, IntFormat):
                tensors["weight_zero_point"] = zero_point.reshape(shape).to(torch.int8)
        for name, spec, static in (
            ("input", layer.config.input_tensors, quantized.inputs),
            ("output", layer.config.output_tensors, quantized.outputs),
        ):
            if spec is not None and static is not None:
                tensors[f"{name}_scale"] = static.scale.reshape(())
                if isinstance(spec.format, IntFormat):
                    zero = torch.zeros(()) if static.zero_point is None else static.zero_point.reshape(())
                    tensors[f"{name}_zero_point"] = zero.to(torch.int8)
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.affine import QParams
        from quantcore.formats.packing import AWQ_ORDER, unpack
        from quantcore.qtensor import QLayer, QTensor

        fmt = layer.weight.format
        if fmt.bits == 4:
            assert isinstance(fmt, IntFormat)
            codes = unpack(tensors["weight"], fmt, AWQ_ORDER).T
            scale = tensors["weight_scale"].float().T
            zero_point = unpack(tensors["weight_zero_point"], fmt, AWQ_ORDER).T.to(torch.int32)
        else:
            codes = tensors["weight"]
            scale = tensors["weight_scale"].float().reshape(layer.num_scales)
            zero_point = None  # 8-bit weights are symmetric here: what is stored is zeros
        params = QParams(scale, None if layer.weight.symmetric else zero_point)

        def activation(name: str, spec: QuantizationSpec | None) -> QParams | None:
            if spec is None or f"{name}_scale" not in tensors:
                return None
            zero = None if spec.symmetric else tensors[f"{name}_zero_point"].to(torch.int32).reshape(1, 1)
            return QParams(tensors[f"{name}_scale"].float().reshape(1, 1), zero)

        return QLayer(
            QTensor(codes, params, layer.weight),
            activation("input", layer.config.input_tensors),
            activation("output", layer.config.output_tensors),
        )

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        return {
            "quant_method": "quark",
            "version": QUARK_VERSION,
            "quant_mode": "eager_mode",
            "global_quant_config": _layer_dict(config.global_quant_config),
            "layer_quant_config": self._layer_overrides(config, layers),
            "layer_type_quant_config": {},
            "kv_cache_quant_config": {},
            "kv_cache_post_rope": False,
            "softmax_quant_spec": None,
            "algo_config": None,
            "exclude": list(kept),
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }

    def load_hint(self, path: str) -> str:
        return f"from vllm import LLM\nllm = LLM('{path}', quantization='quark')"

    @staticmethod
    def _layer_overrides(config: Config, layers: tuple[LayerPlan, ...]) -> dict[str, Any]:
        """Full names, not patterns: readers disagree about globs, none about an exact name."""
        return {layer.name: _layer_dict(layer.config) for layer in layers if layer.config != config.global_quant_config}


def _layer_dict(config: QuantizationConfig) -> dict[str, Any]:
    return {
        "weight": _spec_dict(config.weight, is_input=False),
        "input_tensors": _spec_dict(config.input_tensors, is_input=True),
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }


def _spec_dict(spec: QuantizationSpec | None, *, is_input: bool) -> dict[str, Any] | None:
    """The keys that Quark 0.13 writes for one tensor. Groups run along axis -1; per_channel inputs are per token."""
    if spec is None:
        return None
    channel_axis = 1 if is_input else 0
    ch_axis = {QSchemeType.per_tensor: None, QSchemeType.per_channel: channel_axis, QSchemeType.per_group: -1}[
        spec.qscheme
    ]
    return {
        "dtype": spec.dtype.value,
        "observer_cls": spec.observer_cls,
        "is_dynamic": spec.is_dynamic,
        "qscheme": spec.qscheme.value,
        "ch_axis": ch_axis,
        "group_size": spec.group_size,
        "block_size": None,
        "symmetric": spec.symmetric,
        "round_method": spec.round_method.value,
        "scale_type": spec.scale_type.value,
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }


_exporter: Exporter = EXPORTERS.add("quark")(QuarkExporter())
