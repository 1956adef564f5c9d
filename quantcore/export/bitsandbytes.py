"""The format of bitsandbytes (``quant_method: bitsandbytes``), which Transformers loads as it is.

4 bits (NF4, FP4; Dettmers et al. 2023, "QLoRA"): ``weight`` uint8 [out * in / 2, 1], two codes a byte, the even one in
the high half, rows one after another; ``weight.absmax`` float32 [out * in / block], the scale of each block;
``weight.quant_map`` float32 [16]; ``weight.quant_state.bitsandbytes__nf4``, JSON as bytes.
8 bits (Dettmers et al. 2022, "LLM.int8()"): ``weight`` int8 [out, in]; ``SCB`` float32 [out], the scale times 127;
``weight_format`` uint8 [], 0. Inputs are rounded to int8 token by token, but for features with an outlier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    is_plain,
    refuse_activations,
    refuse_everywhere,
)
from quantcore.export.stored import StoredFiles, StoredLayer, not_held
from quantcore.layer import LayerPlan

if TYPE_CHECKING:
    from quantcore.qtensor import QLayer

QUANT_TYPES = {Dtype.nf4: "nf4", Dtype.fp4_bnb: "fp4"}
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
INT8_STEPS = 127


class BitsAndBytesExporter:
    name = "bitsandbytes"
    title = "bitsandbytes safetensors (Transformers)"

    def refuse(self, layer: LayerPlan) -> str | None:
        if reason := refuse_everywhere(layer, outliers=True):
            return reason
        weight = layer.weight
        if weight.dtype in QUANT_TYPES:
            if weight.qscheme is not QSchemeType.per_group or layer.group_size not in BLOCK_SIZES:
                return f"its blocks have {', '.join(map(str, BLOCK_SIZES))} values"
            return refuse_activations(layer) or (None if is_plain(weight) else "its scales are ordinary numbers")
        if weight.dtype is not Dtype.int8:
            return "it has nf4, fp4_bnb and int8"
        if weight.qscheme is not QSchemeType.per_channel or not weight.symmetric or not is_plain(weight):
            return "int8 weights are per_channel and symmetric with plain scales"
        if weight.scale_type is ScaleType.float32:
            return "it stores int8 scales times 127, where 16 bits stay exact: scale_type float, float16 or bfloat16"
        if layer.config.output_tensors is not None or not _is_int8_token(layer.input_tensors):
            return "with int8 weights it rounds inputs to int8 as well: dynamic, per_channel and symmetric"
        return None

    def same_everywhere(self, layer: LayerPlan) -> dict[str, object]:
        inputs = layer.input_tensors
        return {"dtype": layer.weight.dtype.value, "outlier_threshold": inputs.outlier_threshold if inputs else None}

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        if layer.weight.dtype is Dtype.int8:
            return {
                "weight": TensorLayout("I8", layer.shape),
                "SCB": TensorLayout("F32", (layer.out_features,)),
                "weight_format": TensorLayout("U8", ()),
            }
        rows, groups = layer.num_scales
        return {
            "weight": TensorLayout("U8", (layer.out_features * layer.in_features // 2, 1)),
            "weight.absmax": TensorLayout("F32", (rows * groups,)),
            "weight.quant_map": TensorLayout("F32", (16,)),
            _state_name(layer): TensorLayout("U8", (len(_state(layer, model_dtype)),)),
        }

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        from quantcore.formats.packing import HIGH_FIRST, pack

        weight, scale = quantized.weight, quantized.weight.params.scale
        if layer.weight.dtype is Dtype.int8:
            zero = torch.zeros((), dtype=torch.uint8)
            return {"weight": weight.codes, "SCB": scale.flatten() * INT8_STEPS, "weight_format": zero}
        table = torch.arange(16, dtype=torch.uint8)
        return {
            "weight": pack(weight.codes.flatten(), 4, HIGH_FIRST, torch.uint8).unsqueeze(1),
            "weight.absmax": scale.flatten(),
            "weight.quant_map": layer.weight.format.decode(table),
            _state_name(layer): torch.tensor(list(_state(layer, model_dtype)), dtype=torch.uint8),
        }

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.affine import QParams
        from quantcore.formats.packing import HIGH_FIRST, unpack
        from quantcore.qtensor import QLayer, QTensor

        if layer.weight.dtype is Dtype.int8:
            params = QParams((tensors["SCB"] / INT8_STEPS).unsqueeze(1))
            return QLayer(QTensor(tensors["weight"], params, layer.weight))
        codes = unpack(tensors["weight"].flatten(), layer.weight.format, HIGH_FIRST).view(layer.shape)
        return QLayer(QTensor(codes, QParams(tensors["weight.absmax"].view(layer.num_scales)), layer.weight))

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        dtype, inputs = layers[0].weight.dtype, layers[0].input_tensors
        shared = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": list(kept)}
        if inputs is not None:
            return shared | {"load_in_8bit": True, "llm_int8_threshold": inputs.outlier_threshold or 0.0}
        return shared | {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": QUANT_TYPES[dtype],
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
        }

    def knows(self, said: Mapping[str, Any]) -> bool:
        return said.get("quant_method") == "bitsandbytes" or bool(said.get("load_in_4bit") or said.get("load_in_8bit"))

    def find_layers(self, said: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        found = {}
        for dtype, kind in QUANT_TYPES.items():
            for name in files.modules_with(f"weight.quant_state.bitsandbytes__{kind}"):
                state = json.loads(files.read_bytes(f"{name}.weight.quant_state.bitsandbytes__{kind}"))
                if "nested_blocksize" in state:
                    raise not_held(f"the scales of {name} are quantized once more (double quantization)")
                spec = QuantizationSpec(
                    dtype=dtype, qscheme=QSchemeType.per_group, group_size=state["blocksize"],
                    scale_type=ScaleType.float32,
                )  # fmt: skip
                found[name] = StoredLayer(tuple(state["shape"]), QuantizationConfig(weight=spec))
        inputs = QuantizationSpec(
            dtype=Dtype.int8, qscheme=QSchemeType.per_channel, is_dynamic=True,
            outlier_threshold=said.get("llm_int8_threshold", 6.0) or None,
        )  # fmt: skip
        weight = QuantizationSpec(dtype=Dtype.int8, qscheme=QSchemeType.per_channel)
        for name in files.modules_with("SCB"):
            config = QuantizationConfig(weight=weight, input_tensors=inputs)
            found[name] = StoredLayer(files.shape(f"{name}.weight"), config)
        return found

    def load_hint(self, path: str) -> str:
        return f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('{path}')"


def _is_int8_token(inputs: QuantizationSpec | None) -> bool:
    return (
        inputs is not None
        and inputs.dtype is Dtype.int8
        and bool(inputs.is_dynamic)
        and bool(inputs.symmetric)
        and inputs.qscheme is QSchemeType.per_channel
        and is_plain(inputs)
    )


def _state_name(layer: LayerPlan) -> str:
    return f"weight.quant_state.bitsandbytes__{QUANT_TYPES[layer.weight.dtype]}"


def _state(layer: LayerPlan, model_dtype: str) -> bytes:
    """What bitsandbytes must know to dequantize, as it writes it."""
    state = {
        "quant_type": QUANT_TYPES[layer.weight.dtype],
        "blocksize": layer.group_size,
        "dtype": DTYPES[model_dtype],
        "shape": list(layer.shape),
    }
    return json.dumps(state).encode()


_exporter: Exporter = EXPORTERS.add("bitsandbytes")(BitsAndBytesExporter())
