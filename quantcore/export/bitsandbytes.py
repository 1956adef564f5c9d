"""The format of bitsandbytes (``quant_method: bitsandbytes``), which Transformers loads as it is.

4 bits (NF4, FP4; Dettmers et al. 2023, "QLoRA"): ``weight`` uint8 [out * in / 2, 1], two codes a byte, the even one in
the high half, rows one after another; ``weight.absmax`` float32 [out * in / block], the scale of each block;
``weight.quant_map`` float32 [16]; ``weight.quant_state.bitsandbytes__nf4``, JSON as bytes. With double quantization
``weight.absmax`` is uint8, codes of ``weight.nested_quant_map`` float32 [256] times ``weight.nested_absmax`` float32
[scales / 256]; the mean, which is added, is in the JSON (see ``double_quant``).
8 bits (Dettmers et al. 2022, "LLM.int8()"): ``weight`` int8 [out, in]; ``SCB`` float32 [out], the scale times 127;
``weight_format`` uint8 [], 0. Inputs are rounded to int8 token by token, except features with an outlier.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.config.spec import SCALE_BLOCK
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    is_plain,
    refuse_activations,
    refuse_everywhere,
)
from quantcore.export.importer import StoredFiles, StoredLayer, not_held
from quantcore.export.readers import Readers

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer

QUANT_TYPES = {Dtype.nf4: "nf4", Dtype.fp4_bnb: "fp4"}
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
INT8_STEPS = 127
OFFSET_DIGITS = 24  # of the longest float32 in JSON: shorter ones are padded with blanks


class BitsAndBytesReaders(Readers):
    def transformers_dtype(self, layers: Sequence[LayerPlan]) -> Literal["float32", "bfloat16"]:
        return "bfloat16"  # that of its config

    def rounds_inputs(self, layers: Sequence[LayerPlan]) -> bool:
        return any(layer.input_tensors is not None for layer in layers)  # LLM.int8()


class BitsAndBytesExporter:
    name = "bitsandbytes"
    title = "bitsandbytes safetensors (Transformers)"
    readers = BitsAndBytesReaders(
        "Transformers + bitsandbytes", preference=3, in_transformers=True, transformers_package="bitsandbytes"
    )

    def refuse(self, layer: LayerPlan) -> str | None:
        if reason := refuse_everywhere(layer, outliers=True):
            return reason
        weight = layer.weight
        if weight.dtype in QUANT_TYPES:
            if weight.qscheme is not QSchemeType.per_group or layer.group_size not in BLOCK_SIZES:
                return f"its blocks have {', '.join(map(str, BLOCK_SIZES))} values"
            is_known = weight.scale_type is ScaleType.double_quant or is_plain(weight)
            return refuse_activations(layer) or (None if is_known else "its scales are ordinary numbers")
        if weight.dtype is not Dtype.int8:
            return "it supports nf4, fp4_bnb and int8"
        if weight.qscheme is not QSchemeType.per_channel or not weight.symmetric or not is_plain(weight):
            return "int8 weights are per_channel and symmetric with plain scales"
        if weight.scale_type is ScaleType.float32:
            return "it stores int8 scales times 127, which is exact for scale_type float, float16 or bfloat16"
        if layer.config.output_tensors is not None or not _is_int8_token(layer.input_tensors):
            return "with int8 weights, inputs must be int8 as well: dynamic, per_channel and symmetric"
        return None

    def same_everywhere(self, layer: LayerPlan) -> dict[str, object]:
        inputs = layer.input_tensors
        return {
            "dtype": layer.weight.dtype.value,
            "outlier_threshold": inputs.outlier_threshold if inputs else None,
            "double_quant": _is_nested(layer.weight),
        }

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        if layer.weight.dtype is Dtype.int8:
            return {
                "weight": TensorLayout("I8", layer.shape),
                "SCB": TensorLayout("F32", (layer.out_features,)),
                "weight_format": TensorLayout("U8", ()),
            }
        num_scales, is_nested = math.prod(layer.num_scales), _is_nested(layer.weight)
        nested = {
            "weight.nested_absmax": TensorLayout("F32", (-(-num_scales // SCALE_BLOCK),)),
            "weight.nested_quant_map": TensorLayout("F32", (256,)),
        }
        return {
            "weight": TensorLayout("U8", (layer.out_features * layer.in_features // 2, 1)),
            "weight.absmax": TensorLayout("U8" if is_nested else "F32", (num_scales,)),
            "weight.quant_map": TensorLayout("F32", (16,)),
            _state_name(layer): TensorLayout("U8", (len(_state(layer, model_dtype)),), is_text=True),
            **(nested if is_nested else {}),
        }

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        from quantcore.tensors.double_quant import dynamic_map
        from quantcore.tensors.packing import HIGH_FIRST, pack

        weight, scale = quantized.weight, quantized.weight.params.scale
        if layer.weight.dtype is Dtype.int8:
            zero = torch.zeros((), dtype=torch.uint8)
            return {"weight": weight.codes, "SCB": scale.flatten() * INT8_STEPS, "weight_format": zero}
        nested, offset, table = weight.params.nested, 0.0, torch.arange(16, dtype=torch.uint8)
        parts = {
            "weight": pack(weight.codes.flatten(), 4, HIGH_FIRST, torch.uint8).unsqueeze(1),
            "weight.absmax": scale.flatten(),
            "weight.quant_map": layer.weight.format.decode(table),
        }
        if _is_nested(layer.weight):
            assert nested is not None, layer.name
            parts["weight.absmax"], offset = nested.codes.flatten(), nested.offset.item()
            parts["weight.nested_absmax"] = nested.absmax
            parts["weight.nested_quant_map"] = dynamic_map(nested.codes.device).clone()
        state = _state(layer, model_dtype, offset)
        return {**parts, _state_name(layer): torch.tensor(list(state), dtype=torch.uint8)}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.double_quant import NestedScales, dynamic_map
        from quantcore.tensors.packing import HIGH_FIRST, unpack
        from quantcore.tensors.qtensor import QLayer, QTensor

        if layer.weight.dtype is Dtype.int8:
            params = QParams((tensors["SCB"] / INT8_STEPS).unsqueeze(1))
            return QLayer(QTensor(tensors["weight"], params, layer.weight))
        codes = unpack(tensors["weight"].flatten(), layer.weight.format, HIGH_FIRST).view(layer.shape)
        scale = tensors["weight.absmax"].view(layer.num_scales)
        if not _is_nested(layer.weight):
            return QLayer(QTensor(codes, QParams(scale), layer.weight))
        state = json.loads(bytes(tensors[_state_name(layer)].tolist()))
        if not torch.equal(tensors["weight.nested_quant_map"], dynamic_map(scale.device)):
            raise not_held(f"the scales of {layer.name} are codes of a custom map")
        nested = NestedScales(scale, tensors["weight.nested_absmax"], torch.tensor(float(state["nested_offset"])))
        return QLayer(QTensor(codes, QParams(nested.decode(), nested=nested), layer.weight))

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
            "bnb_4bit_use_double_quant": _is_nested(layers[0].weight),
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
        }

    def matches(self, config: Mapping[str, Any]) -> bool:
        loads_quantized = config.get("load_in_4bit") or config.get("load_in_8bit")
        return config.get("quant_method") == "bitsandbytes" or bool(loads_quantized)

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        layers = {}
        for dtype, kind in QUANT_TYPES.items():
            for name in files.modules_with(f"weight.quant_state.bitsandbytes__{kind}"):
                state = json.loads(files.read_bytes(f"{name}.weight.quant_state.bitsandbytes__{kind}"))
                is_nested = "nested_blocksize" in state
                if is_nested and state["nested_blocksize"] != SCALE_BLOCK:
                    raise not_held(f"the scales of {name} are quantized in blocks of {state['nested_blocksize']}")
                spec = QuantizationSpec(
                    dtype=dtype,
                    qscheme=QSchemeType.per_group,
                    group_size=state["blocksize"],
                    scale_type=ScaleType.double_quant if is_nested else ScaleType.float32,
                )
                layers[name] = StoredLayer(tuple(state["shape"]), QuantizationConfig(weight=spec))
        inputs = QuantizationSpec(
            dtype=Dtype.int8,
            qscheme=QSchemeType.per_channel,
            is_dynamic=True,
            outlier_threshold=quantization_config.get("llm_int8_threshold", 6.0) or None,
        )
        weight = QuantizationSpec(dtype=Dtype.int8, qscheme=QSchemeType.per_channel)
        for name in files.modules_with("SCB"):
            config = QuantizationConfig(weight=weight, input_tensors=inputs)
            layers[name] = StoredLayer(files.shape(f"{name}.weight"), config)
        return layers

    def load_hint(self, path: str) -> str:
        return f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained({path!r})"


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


def _is_nested(spec: QuantizationSpec) -> bool:
    return spec.scale_type is ScaleType.double_quant


def _state(layer: LayerPlan, model_dtype: str, offset: float = 0.0) -> bytes:
    """Return the quantization state in bitsandbytes' own encoding; its length is the same for every ``offset``."""
    state = {
        "quant_type": QUANT_TYPES[layer.weight.dtype],
        "blocksize": layer.group_size,
        "dtype": DTYPES[model_dtype],
        "shape": list(layer.shape),
    }
    if not _is_nested(layer.weight):
        return json.dumps(state).encode()
    state |= {"nested_blocksize": SCALE_BLOCK, "nested_dtype": "float32"}
    return f'{json.dumps(state)[:-1]}, "nested_offset": {json.dumps(offset).ljust(OFFSET_DIGITS)}}}'.encode()


_exporter: Exporter = EXPORTERS.add("bitsandbytes")(BitsAndBytesExporter())
