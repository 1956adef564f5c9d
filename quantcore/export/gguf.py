"""GGUF, the one-file format of llama.cpp: weights in blocks of 32, tokenizer and shapes of the model in the same file.

Weights alone are quantized. int4, int5 and int8 with float16 scales are Q4_0, Q5_0 and Q8_0, uint4 and uint5 with a
float16 scale and minimum Q4_1 and Q5_1. The file itself (names, order of rows, metadata): ``checkpoint.gguf_file``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.gguf_names import FILE_NAME, Places
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.config import Config, QSchemeType, QuantizationSpec, ScaleType, ZeroPointType
from quantcore.export.exporter import EXPORTERS, Container, Exporter, Tensors, refuse_everywhere
from quantcore.export.gguf_blocks import BLOCK, BLOCK_TYPES, BlockType
from quantcore.layer import LayerPlan

if TYPE_CHECKING:
    from quantcore.checkpoint.gguf_file import GgufSink, GgufSource
    from quantcore.qtensor import QLayer


class GgufExporter:
    name = "gguf"
    title = "GGUF (llama.cpp)"

    def refuse(self, layer: LayerPlan) -> str | None:
        spec = self.adapt(layer).weight
        if reason := refuse_everywhere(layer, real_zero_points=True):
            return reason
        if layer.input_tensors is not None or layer.config.output_tensors is not None:
            return "it holds weights alone, and activations are quantized, too"
        if _block_type(spec) is None or spec.over is not None:
            return "its blocks hold int4, int5 and int8 around zero, and uint4 and uint5 from a minimum"
        if spec.qscheme is not QSchemeType.per_group or layer.group_size != BLOCK:
            return f"weights have groups of {BLOCK} inputs: qscheme per_group with group_size {BLOCK}"
        if spec.scale_type is not ScaleType.float16:
            return "scales are float16: scale_type float16, or float for what the format takes"
        return None

    def adapt(self, layer: LayerPlan) -> LayerPlan:
        """float16 scales where the config leaves the type open, and minimums in place of whole zero points."""
        spec = layer.weight
        if _block_type(spec) is None or spec.qscheme is not QSchemeType.per_group:
            return layer
        if spec.scale_type is ScaleType.float:
            spec = replace(spec, scale_type=ScaleType.float16)
        if not spec.symmetric:
            spec = replace(spec, zero_point_type=ZeroPointType.float32)
        return replace(layer, config=replace(layer.config, weight=spec))

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        block = BLOCK_TYPES[layer.weight.dtype]
        row_bytes = layer.in_features // BLOCK * block.num_bytes
        return {"weight": TensorLayout(block.name, (layer.out_features, row_bytes))}

    def encode(self, layer: LayerPlan, quantized: QLayer) -> Tensors:
        return {"weight": BLOCK_TYPES[layer.weight.dtype].encode(quantized.weight)}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.qtensor import QLayer

        return QLayer(BLOCK_TYPES[layer.weight.dtype].decode(tensors["weight"], layer.weight))

    def quantization_config(self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]) -> None:
        return None

    def load_hint(self, path: str) -> str:
        return f"from llama_cpp import Llama\nllm = Llama('{path}/{FILE_NAME}')"

    def float_layout(self, name: str, tensor: TensorHeader, model_config: Mapping[str, Any]) -> TensorLayout | None:
        return Places(model_config).layout(name, tensor)

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        Places(model_config).check(model_config, layouts)

    def sink(
        self, folder: Path, layouts: Mapping[str, TensorLayout], model_config: Mapping[str, Any], model_dir: Path
    ) -> GgufSink:
        from quantcore.checkpoint.gguf_file import GgufSink

        return GgufSink(folder, layouts, model_config, model_dir)

    def source(
        self, folder: Path, layouts: Mapping[str, TensorLayout], model_config: Mapping[str, Any],
        floats: Mapping[str, TensorHeader],
    ) -> GgufSource:  # fmt: skip
        from quantcore.checkpoint.gguf_file import GgufSource

        return GgufSource(folder, layouts, model_config, floats)


def _block_type(spec: QuantizationSpec) -> BlockType | None:
    found = BLOCK_TYPES.get(spec.dtype)
    return None if found is None or found.has_minimum == spec.symmetric else found


_exporter: Exporter = EXPORTERS.add("gguf")(GgufExporter())
_container: Container = GgufExporter()
