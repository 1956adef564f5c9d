"""The fp8 format of Transformers and vLLM (``quant_method: fp8``), AMD Quark's ``custom_mode="fp8"``.

Every quantized layer has fp8_e4m3 weights [out, in] and static inputs with one scale each: ``weight_scale`` [] and
``input_scale`` []. Scales of the KV cache lie beside the projections: ``self_attn.k_scale`` and ``self_attn.v_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.export.exporter import (
    EXPORTERS,
    KV_SCALES,
    Exporter,
    Tensors,
    is_plain,
    refuse_everywhere,
    stored_scale_dtype,
    tensor_name,
)
from quantcore.export.stored import StoredFiles, StoredLayer, not_held
from quantcore.layer import LayerPlan

if TYPE_CHECKING:
    from quantcore.qtensor import QLayer


class Fp8Exporter:
    name = "fp8"
    title = "fp8 safetensors (vLLM)"

    def refuse(self, layer: LayerPlan) -> str | None:
        if reason := refuse_everywhere(layer):
            return reason
        outputs = layer.config.output_tensors
        if not _is_static_fp8(layer.weight) or not _is_static_fp8(layer.input_tensors):
            return "every layer has fp8_e4m3 weights and inputs with one static scale each"
        if outputs is not None and (not _is_static_fp8(outputs) or layer.name.rpartition(".")[2] not in KV_SCALES):
            return f"only outputs of {' and '.join(KV_SCALES)} have a scale, static fp8_e4m3 per_tensor"
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        assert layer.input_tensors is not None
        tensors = {
            "weight": TensorLayout("F8_E4M3", layer.shape),
            "weight_scale": TensorLayout(stored_scale_dtype(layer.weight, model_dtype), ()),
            "input_scale": TensorLayout(stored_scale_dtype(layer.input_tensors, model_dtype), ()),
        }
        if layer.config.output_tensors is not None:
            scale = TensorLayout(stored_scale_dtype(layer.config.output_tensors, model_dtype), ())
            tensors[KV_SCALES[layer.name.rpartition(".")[2]]] = scale
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        assert quantized.inputs is not None
        tensors = {
            "weight": quantized.weight.codes,
            "weight_scale": quantized.weight.params.scale.reshape(()),
            "input_scale": quantized.inputs.scale.reshape(()),
        }
        if quantized.outputs is not None:
            tensors[KV_SCALES[layer.name.rpartition(".")[2]]] = quantized.outputs.scale.reshape(())
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.affine import QParams
        from quantcore.qtensor import QLayer, QTensor

        def params(name: str) -> QParams:
            return QParams(tensors[name].float().reshape(1, 1))

        has_outputs = layer.config.output_tensors is not None
        return QLayer(
            QTensor(tensors["weight"], params("weight_scale"), layer.weight),
            params("input_scale"),
            params(KV_SCALES[layer.name.rpartition(".")[2]]) if has_outputs else None,
        )

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        has_cache = any(layer.config.output_tensors is not None for layer in layers)
        return {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": list(kept),
            "kv_cache_scheme": "static" if has_cache else None,
        }

    def knows(self, said: Mapping[str, Any]) -> bool:
        return said.get("quant_method") == "fp8"

    def find_layers(self, said: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        if said.get("activation_scheme") != "static" or said.get("weight_block_size"):
            raise not_held("of fp8 only static inputs with one scale are known")
        static = QuantizationSpec(dtype=Dtype.fp8_e4m3)
        found = {}
        for name in files.modules_with("weight_scale"):
            output = KV_SCALES.get(name.rpartition(".")[2])
            cache = tensor_name(name, output) if output else ""
            config = QuantizationConfig(
                weight=files.with_scale(static, f"{name}.weight_scale"),
                input_tensors=files.with_scale(static, f"{name}.input_scale"),
                output_tensors=files.with_scale(static, cache) if cache in files.tensors else None,
            )
            found[name] = StoredLayer(files.shape(f"{name}.weight"), config)
        return found

    def load_hint(self, path: str) -> str:
        return f"from vllm import LLM\nllm = LLM('{path}', quantization='fp8')"


def _is_static_fp8(spec: QuantizationSpec | None) -> bool:
    return (
        spec is not None
        and spec.dtype is Dtype.fp8_e4m3
        and spec.qscheme is QSchemeType.per_tensor
        and spec.is_static
        and is_plain(spec)
    )


_exporter: Exporter = EXPORTERS.add("fp8")(Fp8Exporter())
