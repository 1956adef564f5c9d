"""GGUF, the one-file format of llama.cpp: weights in blocks of 32, tokenizer and shapes of the model in the same file.

Only weights are quantized. int4, int5, int8 and iq4_nl with float16 scales are Q4_0, Q5_0, Q8_0 and IQ4_NL, uint4 and
uint5 with a float16 scale and minimum Q4_1 and Q5_1; with scales in two levels (``super_blocks``) uint2 to uint5, int3,
int6 and iq4_nl are the K-types and IQ4_XS; vectors (``formats.vectors``) are IQ1 to IQ3; fp4 with scales of one byte
is MXFP4 and NVFP4; -1, 0 and 1 under a float16 scale per 256 are TQ1_0 and TQ2_0. The file itself (names, order of
rows, metadata): ``quantcore.engine.containers.gguf``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader, TensorLayout
from quantcore.config.gguf_types import GGUF_TYPES, SHORT_ROWS
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    ZeroPointType,
)
from quantcore.export.exporter import EXPORTERS, Container, Exporter, Tensors, refuse_activations, refuse_everywhere
from quantcore.export.gguf.blocks import BLOCK_TYPES
from quantcore.export.gguf.converter import check_converter
from quantcore.export.gguf.float_blocks import FLOAT_TYPES
from quantcore.export.gguf.k_blocks import K_TYPES
from quantcore.export.gguf.low_bit_blocks import LOW_BIT_TYPES
from quantcore.export.gguf.one_bit_blocks import ONE_BIT_TYPES
from quantcore.export.gguf.tensor_names import COMPUTED, FILE_NAME, Places, has_own_layout
from quantcore.export.gguf.ternary_blocks import TERNARY_TYPES
from quantcore.export.gguf.vector_blocks import VECTOR_TYPES
from quantcore.export.importer import StoredFiles, StoredLayer
from quantcore.export.readers import Readers

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.qtensor import QLayer, QTensor


class Block(Protocol):
    """What writes and reads the bytes of one type."""

    @property
    def num_bytes(self) -> int: ...
    def encode(self, weight: QTensor) -> torch.Tensor: ...
    def decode(self, rows: torch.Tensor, spec: QuantizationSpec) -> QTensor: ...


BLOCKS: dict[str, Block] = {
    **BLOCK_TYPES, **K_TYPES, **LOW_BIT_TYPES, **VECTOR_TYPES, **FLOAT_TYPES, **TERNARY_TYPES, **ONE_BIT_TYPES
}  # fmt: skip


class GgufReaders(Readers):
    def prefers(self, layers: Sequence[LayerPlan]) -> bool:
        """Scales in float16 are GGUF's own."""
        return any(layer.weight.scale_type is ScaleType.float16 for layer in layers)


class GgufExporter:
    name = "gguf"
    title = "GGUF (llama.cpp)"
    readers = GgufReaders(
        "llama.cpp",
        preference=4,
        in_transformers=True,
        for_transformers=False,
        transformers_package="gguf",
        types_every_tensor=True,
    )
    holds_tokenizer = True
    can_be_split = True
    file_module = "quantcore.engine.containers.gguf"

    def refuse(self, layer: LayerPlan) -> str | None:
        spec = _fitted(layer).weight
        if reason := refuse_everywhere(layer, real_zero_points=True, embeddings=True) or refuse_activations(layer):
            return reason
        name = gguf_type(spec)
        if name is None or spec.over is not None:
            return (
                "its blocks store symmetric int4, int5 and int8, uint4 and uint5 with a minimum, iq4_nl, the vectors of"
                " iq1 to iq3, fp4 with scales e8m0 or ue4m3, or tq1_0 and tq2_0"
            )
        stored = GGUF_TYPES[name]
        if spec.qscheme is not QSchemeType.per_group or layer.group_size != stored.group_size:
            size = stored.group_size
            return f"weights must have groups of {size} inputs: qscheme per_group with group_size {size}"
        if spec.scale_type is not stored.scale_type:
            return "scales are stored as float16: set scale_type float16, or float for the default"
        return None

    def adapt(self, layers: tuple[LayerPlan, ...]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
        """Choose float16 scales where the config leaves the type open, and minimums in place of whole zero points.

        Rows must be whole blocks of a type; other layers get a type with smaller blocks instead.
        """
        fitted = tuple(map(_fitted, layers))
        pairs = list(zip(layers, fitted, strict=True))
        short = [old for old, new in pairs if gguf_type(old.weight) != gguf_type(new.weight)]
        moved = [old for old, new in pairs if old.weight.zero_point_type is not new.weight.zero_point_type]
        moved = [layer for layer in moved if layer not in short]
        warnings = []
        if moved:
            warnings.append(f"gguf stores float16 scales and minimums, so {len(moved)} layer(s) use them.")
        if short:
            kinds = sorted({f"{_name(new)} instead of {_name(old)}" for old, new in pairs if old in short})
            sizes = " or ".join(sorted({str(GGUF_BLOCKS[_name(layer)][0]) for layer in short}))
            warnings.append(
                f"The rows of {len(short)} layer(s) are not a multiple of {sizes}, first {short[0].name}: "
                f"they are stored as {', '.join(kinds)}."
            )
        return fitted, tuple(warnings)

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        name = _name(layer)
        width, num_bytes = GGUF_BLOCKS[name]
        return {"weight": TensorLayout(name, (layer.out_features, layer.in_features // width * num_bytes))}

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        return {"weight": BLOCKS[_name(layer)].encode(quantized.weight)}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.tensors.qtensor import QLayer

        return QLayer(BLOCKS[_name(layer)].decode(tensors["weight"], layer.weight))

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
        file = path if path.endswith(".gguf") else f"{path}/{FILE_NAME}"
        return f"from llama_cpp import Llama\nllm = Llama({file!r})"

    def float_layout(self, name: str, tensor: TensorHeader, model_config: Mapping[str, Any]) -> TensorLayout | None:
        if has_own_layout(model_config):
            return Places(model_config).layout(name, tensor)
        return None if name.endswith(COMPUTED) else TensorLayout(tensor.dtype, tensor.shape)

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        if has_own_layout(model_config):
            Places(model_config).check(model_config, layouts)
        else:
            check_converter(model_config)


def _fitted(layer: LayerPlan) -> LayerPlan:
    spec, name = layer.weight, gguf_type(layer.weight)
    if name is None or spec.qscheme is not QSchemeType.per_group:
        return layer
    is_short = layer.in_features % GGUF_BLOCKS[name][0] > 0 and layer.group_size == GGUF_TYPES[name].group_size
    if is_short and name in SHORT_ROWS:
        plain = GGUF_TYPES[SHORT_ROWS[name]]
        spec = replace(
            spec,
            dtype=plain.dtype,
            group_size=plain.group_size,
            scale_type=plain.scale_type,
            symmetric=plain.symmetric,
            zero_point_type=plain.zero_point_type,
        )
    if spec.scale_type is ScaleType.float:
        spec = replace(spec, scale_type=ScaleType.float16)
    if not spec.symmetric:
        spec = replace(spec, zero_point_type=ZeroPointType.float32)
    return replace(layer, config=replace(layer.config, weight=spec))


def _key(spec: QuantizationSpec) -> tuple[Dtype, bool | None, ScaleType | None]:
    kind = spec.scale_type
    return spec.dtype, spec.symmetric, kind if kind.is_whole or kind.in_one_byte else None


_BY_SPEC = {_key(spec): name for name, spec in GGUF_TYPES.items()}


def gguf_type(spec: QuantizationSpec) -> str | None:
    """Return the type that stores such codes and scales, whatever the groups are; None if there is none."""
    return _BY_SPEC.get(_key(spec))


def _name(layer: LayerPlan) -> str:
    name = gguf_type(layer.weight)
    assert name is not None, layer.scheme
    return name


_gguf = GgufExporter()
_container: Container = _gguf
_exporter: Exporter = EXPORTERS.add("gguf")(_gguf)
