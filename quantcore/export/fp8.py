"""The fp8 format of Transformers and vLLM (``quant_method: fp8``), AMD Quark's ``custom_mode="fp8"``.

All layers have fp8_e4m3 weights [out, in], in one of two forms. Either weights and static inputs have one scale each:
``weight_scale`` [] and ``input_scale`` []. Or weights have scales of blocks, as DeepSeek-V3 has them, and inputs are
quantized at run time: ``weight_scale_inv`` float32 [out / height, in / width], the factor of the codes despite its
name. DeepSeek-V4's scales are powers of two, and its experts fp4; these are only read. Scales of the KV cache lie
beside the projections: ``self_attn.k_scale`` and ``self_attn.v_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.export.exporter import (
    EXPORTERS,
    KV_SCALES,
    Exporter,
    Tensors,
    is_static_fp8,
    refuse_blocks,
    refuse_everywhere,
    stored_scale_dtype,
    tensor_name,
)
from quantcore.export.importer import StoredFiles, StoredLayer, not_held
from quantcore.export.readers import Readers

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer


E8M0 = "F8_E8M0"
"""The dtype of scales that are powers of two, in safetensors."""


class Fp8Readers(Readers):
    def only_on_gpus(self, layers: Sequence[LayerPlan]) -> str | None:
        if any(layer.weight.block_size is None for layer in layers):
            return "Without a GPU, Transformers reads only fp8 files with per_block weights."
        return None

    def transformers_dtype(self, layers: Sequence[LayerPlan]) -> Literal["float32", "bfloat16"]:
        return "bfloat16"


class Fp8Exporter:
    name = "fp8"
    title = "fp8 safetensors (vLLM)"
    readers = Fp8Readers("vLLM (CPU)", preference=6, in_vllm=True, in_transformers=True)

    def refuse(self, layer: LayerPlan) -> str | None:
        if reason := refuse_everywhere(layer):
            return reason
        weight, inputs, outputs = layer.weight, layer.input_tensors, layer.config.output_tensors
        if outputs is not None and (not is_static_fp8(outputs) or layer.name.rpartition(".")[2] not in KV_SCALES):
            return f"only outputs of {' and '.join(KV_SCALES)} have a scale, static fp8_e4m3 per_tensor"
        if weight.block_size is not None:
            if inputs is None:
                return "its consumers quantize the inputs of per_block weights, which are not quantized here"
            # Transformers computes the size of a block as the weight's size divided by the number of blocks.
            if layer.out_features % weight.block_size[0]:
                return f"blocks of {weight.block_size[0]} output channels must fill all {layer.out_features}"
            return refuse_blocks(layer)
        if not is_static_fp8(weight) or not is_static_fp8(inputs):
            return "layers need fp8_e4m3 weights and inputs with one static scale each, or per_block weights"
        return None

    def same_everywhere(self, layer: LayerPlan) -> dict[str, object]:
        return {"block_size of weights": layer.weight.block_size}

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        inputs, outputs = layer.input_tensors, layer.config.output_tensors
        tensors = {"weight": TensorLayout("F8_E4M3", layer.shape)}
        if layer.weight.scale_type is ScaleType.e8m0:  # of DeepSeek-V4: only read
            if layer.weight.dtype is Dtype.fp4:
                tensors["weight"] = TensorLayout("I8", (layer.out_features, layer.in_features // 2))
            tensors["weight_scale_inv"] = TensorLayout(E8M0, layer.num_scales)
        elif layer.weight.block_size is not None:
            tensors["weight_scale_inv"] = TensorLayout("F32", layer.num_scales)
        else:
            tensors["weight_scale"] = TensorLayout(stored_scale_dtype(layer.weight, model_dtype), ())
            assert inputs is not None
            tensors["input_scale"] = TensorLayout(stored_scale_dtype(inputs, model_dtype), ())
        if outputs is not None:
            tensors[_kv_scale(layer)] = TensorLayout(stored_scale_dtype(outputs, model_dtype), ())
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        scale = quantized.weight.params.scale
        tensors = {"weight": quantized.weight.codes}
        if quantized.inputs is None:
            tensors["weight_scale_inv"] = scale
        else:
            tensors["weight_scale"] = scale.reshape(())
            tensors["input_scale"] = quantized.inputs.scale.reshape(())
        if quantized.outputs is not None:
            tensors[_kv_scale(layer)] = quantized.outputs.scale.reshape(())
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QLayer, QTensor

        def params(name: str) -> QParams:
            return QParams(tensors[name].float().reshape(1, 1))

        is_blocked = "weight_scale_inv" in tensors
        scale = QParams(tensors["weight_scale_inv"].float()) if is_blocked else params("weight_scale")
        codes = tensors["weight"]
        if layer.weight.dtype is Dtype.fp4:
            codes = unpack(codes.view(torch.uint8), layer.weight.format)
        return QLayer(
            QTensor(codes, scale, layer.weight),
            None if is_blocked else params("input_scale"),
            None if layer.config.output_tensors is None else params(_kv_scale(layer)),
        )

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        has_cache = any(layer.config.output_tensors is not None for layer in layers)
        block = layers[0].weight.block_size
        return {
            "quant_method": "fp8",
            "activation_scheme": "static" if block is None else "dynamic",
            **({} if block is None else {"weight_block_size": list(block)}),
            "ignored_layers": list(kept),
            "kv_cache_scheme": "static" if has_cache else None,
        }

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "fp8"

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        if block := quantization_config.get("weight_block_size"):
            names = files.modules_with("weight_scale_inv")
            return {name: _layer_in_blocks(name, tuple(block), files) for name in names}
        if quantization_config.get("activation_scheme") != "static":
            raise not_held("of fp8, only static inputs with one scale and per_block weights are supported")
        return {name: _stored_layer(name, files) for name in files.modules_with("weight_scale")}

    def load_hint(self, path: str) -> str:
        return f"from vllm import LLM\nllm = LLM({path!r}, quantization='fp8')"


def _kv_scale(layer: LayerPlan) -> str:
    return KV_SCALES[layer.name.rpartition(".")[2]]


def _layer_in_blocks(name: str, block: tuple[int, ...], files: StoredFiles) -> StoredLayer:
    """Describe a layer of weights in blocks, or of DeepSeek-V4's fp4 codes in groups of 32, two in a byte."""
    out_features, width = files.shape(f"{name}.weight")
    scale = files.tensors[f"{name}.weight_scale_inv"]
    if files.tensors[f"{name}.weight"].dtype != "I8":
        kind = ScaleType.e8m0 if scale.dtype == E8M0 else ScaleType.float32
        return StoredLayer((out_features, width), _in_blocks(block, kind))
    if scale.dtype != E8M0 or scale.shape != (out_features, 2 * width // 32):
        raise not_held(f"the int8 codes of {name} are not fp4 with e8m0 scales in groups of 32")
    spec = QuantizationSpec(
        dtype=Dtype.fp4, qscheme=QSchemeType.per_group, group_size=32, ch_axis=-1, scale_type=ScaleType.e8m0
    )
    return StoredLayer((out_features, 2 * width), QuantizationConfig(weight=spec))


def _in_blocks(block: tuple[int, ...], scale_type: ScaleType) -> QuantizationConfig:
    height, width = block
    weight = QuantizationSpec(
        dtype=Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=(height, width), scale_type=scale_type
    )
    inputs = QuantizationSpec(dtype=Dtype.fp8_e4m3, qscheme=QSchemeType.per_group, group_size=width, is_dynamic=True)
    return QuantizationConfig(weight=weight, input_tensors=inputs)


def _stored_layer(name: str, files: StoredFiles) -> StoredLayer:
    static = QuantizationSpec(dtype=Dtype.fp8_e4m3)
    output = KV_SCALES.get(name.rpartition(".")[2])
    cache = tensor_name(name, output) if output else ""
    config = QuantizationConfig(
        weight=files.with_scale(static, f"{name}.weight_scale"),
        input_tensors=files.with_scale(static, f"{name}.input_scale"),
        output_tensors=files.with_scale(static, cache) if cache in files.tensors else None,
    )
    return StoredLayer(files.shape(f"{name}.weight"), config)


_exporter: Exporter = EXPORTERS.add("fp8")(Fp8Exporter())
