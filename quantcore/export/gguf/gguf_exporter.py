"""GGUF, the one-file format of llama.cpp: weights in blocks of 32, tokenizer and shapes of the model in the same file.

Only weights are quantized. int4, int5 and int8 with float16 scales are Q4_0, Q5_0 and Q8_0, uint4 and uint5 with a
float16 scale and minimum Q4_1 and Q5_1; with scales in two levels (``super_blocks``) they and int6 are Q4_K, Q5_K and
Q6_K. The file itself (names, order of rows, metadata): ``quantcore.engine.containers.gguf``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader, TensorLayout
from quantcore.config.gguf_types import GGUF_TYPES, SHORT_ROWS
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    Config,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    ZeroPointType,
)
from quantcore.config.spec import SUPER_BLOCK
from quantcore.export.exporter import EXPORTERS, Container, Exporter, Tensors, refuse_activations, refuse_everywhere
from quantcore.export.gguf.blocks import BLOCK, BLOCK_TYPES, BlockType
from quantcore.export.gguf.k_blocks import K_TYPES, Q6K, MinimumK
from quantcore.export.gguf.tensor_names import FILE_NAME, Places
from quantcore.export.importer import StoredFiles, StoredLayer
from quantcore.export.readers import Readers

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer


class GgufReaders(Readers):
    def prefers(self, layers: Sequence[LayerPlan]) -> bool:
        """Scales in float16 are GGUF's own."""
        return any(layer.weight.scale_type is ScaleType.float16 for layer in layers)


class GgufExporter:
    name = "gguf"
    title = "GGUF (llama.cpp)"
    readers = GgufReaders(
        "llama.cpp", preference=4, in_transformers=True, for_transformers=False, transformers_package="gguf",
        types_every_tensor=True,
    )  # fmt: skip
    holds_tokenizer = True
    file_module = "quantcore.engine.containers.gguf"

    def refuse(self, layer: LayerPlan) -> str | None:
        spec = _fitted(layer).weight
        if reason := refuse_everywhere(layer, real_zero_points=True, embeddings=True) or refuse_activations(layer):
            return reason
        if _block_type(spec) is None or spec.over is not None:
            return "its blocks store symmetric int4, int5 and int8, or uint4 and uint5 with a minimum"
        if spec.scale_type.is_whole:
            return None  # such a spec has the groups that a K-type has
        if spec.qscheme is not QSchemeType.per_group or layer.group_size != BLOCK:
            return f"weights must have groups of {BLOCK} inputs: qscheme per_group with group_size {BLOCK}"
        if spec.scale_type is not ScaleType.float16:
            return "scales are stored as float16: set scale_type float16, or float for the default"
        return None

    def adapt(self, layers: tuple[LayerPlan, ...]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
        """Choose float16 scales where the config leaves the type open, and minimums in place of whole zero points.

        K-types need rows of whole super-blocks; other layers get a type with plain blocks instead.
        """
        fitted = tuple(map(_fitted, layers))
        pairs = list(zip(layers, fitted, strict=True))
        short = [old for old, new in pairs if old.weight.scale_type.is_whole > new.weight.scale_type.is_whole]
        moved = [old for old, new in pairs if old.weight.zero_point_type is not new.weight.zero_point_type]
        moved = [layer for layer in moved if layer not in short]
        warnings = []
        if moved:
            warnings.append(f"gguf stores float16 scales and minimums, so {len(moved)} layer(s) use them.")
        if short:
            kinds = sorted({f"{_name(new)} instead of {_name(old)}" for old, new in pairs if old in short})
            warnings.append(
                f"The rows of {len(short)} layer(s) are not a multiple of {SUPER_BLOCK}, first {short[0].name}: "
                f"they are stored as {', '.join(kinds)}."
            )
        return fitted, tuple(warnings)

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        kind = _type_of(layer)
        return {
            "weight": TensorLayout(kind.name, (layer.out_features, layer.in_features // kind.block * kind.num_bytes))
        }

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        return {"weight": _type_of(layer).encode(quantized.weight)}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.tensors.qtensor import QLayer

        return QLayer(_type_of(layer).decode(tensors["weight"], layer.weight))

    def quantization_config(self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]) -> None:
        return None

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "gguf"

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        layers = {}
        for name, tensor in files.tensors.items():
            if tensor.dtype in GGUF_BLOCKS:
                width, num_bytes = GGUF_BLOCKS[tensor.dtype]
                shape = (tensor.shape[0], tensor.shape[1] // num_bytes * width)
                config = QuantizationConfig(weight=GGUF_TYPES[tensor.dtype])
                layers[name.removesuffix(".weight")] = StoredLayer(shape, config)
        return layers

    def load_hint(self, path: str) -> str:
        return f"from llama_cpp import Llama\nllm = Llama({f'{path}/{FILE_NAME}'!r})"

    def float_layout(self, name: str, tensor: TensorHeader, model_config: Mapping[str, Any]) -> TensorLayout | None:
        return Places(model_config).layout(name, tensor)

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        Places(model_config).check(model_config, layouts)


def _fitted(layer: LayerPlan) -> LayerPlan:
    spec = layer.weight
    if _block_type(spec) is None or spec.qscheme is not QSchemeType.per_group:
        return layer
    if spec.scale_type.is_whole and layer.in_features % SUPER_BLOCK:
        plain = GGUF_TYPES[SHORT_ROWS[_name(layer)]]
        spec = replace(
            spec, dtype=plain.dtype, group_size=plain.group_size, scale_type=plain.scale_type,
            symmetric=plain.symmetric, zero_point_type=plain.zero_point_type,
        )  # fmt: skip
    if spec.scale_type is ScaleType.float:
        spec = replace(spec, scale_type=ScaleType.float16)
    if not spec.symmetric:
        spec = replace(spec, zero_point_type=ZeroPointType.float32)
    return replace(layer, config=replace(layer.config, weight=spec))


def _block_type(spec: QuantizationSpec) -> BlockType | MinimumK | Q6K | None:
    if spec.scale_type.is_whole:
        return K_TYPES.get(spec.dtype)
    kind = BLOCK_TYPES.get(spec.dtype)
    return None if kind is None or kind.has_minimum == spec.symmetric else kind


def _type_of(layer: LayerPlan) -> BlockType | MinimumK | Q6K:
    kind = _block_type(layer.weight)
    assert kind is not None, layer.scheme
    return kind


def _name(layer: LayerPlan) -> str:
    return _type_of(layer).name


_gguf = GgufExporter()
_container: Container = _gguf
_exporter: Exporter = EXPORTERS.add("gguf")(_gguf)
