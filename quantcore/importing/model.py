"""Model folders as the engine reads them: float checkpoints unchanged, quantized ones as dequantized floats.

The codes of a quantized checkpoint of a known format, by any writer, are described by ``QuantizedLayers``: planning
sees the float weights' names and shapes, reading dequantizes. So it can be quantized again, converted and evaluated.
Nothing here needs torch before a tensor is read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantcore.checkpoint.adapter import Adapter, read_adapter
from quantcore.checkpoint.besides import warn_of_besides
from quantcore.checkpoint.blocks import find_blocks, natural_order
from quantcore.checkpoint.experts import unstack_experts, unstack_mxfp4
from quantcore.checkpoint.folder import find_gguf, gguf_parts
from quantcore.checkpoint.headers import ModelHeaders, check_files, read_folder
from quantcore.checkpoint.layers import is_head, is_linear
from quantcore.checkpoint.layout import DTYPE_BYTES, GGUF_BLOCKS, TensorHeader, TensorLayout
from quantcore.checkpoint.own_head import untie_own_head
from quantcore.checkpoint.switched_experts import unstack_switched
from quantcore.config.kv_cache import holds_keys_or_values
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, QuantizationConfig
from quantcore.errors import ConfigError, ModelError
from quantcore.export import EXPORTERS, tensor_name
from quantcore.export.gguf.model import read_gguf
from quantcore.export.importer import Importer, StoredFiles
from quantcore.export.mlx import KEY as MLX_KEY
from quantcore.export.mlx import own_settings
from quantcore.export.modelopt import own_description

GPT_OSS = "mxfp4"
"""The ``quant_method`` of gpt-oss: experts in MXFP4, in stacks."""

GPT_OSS_AS_QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
    },
}
GGUF = {"quant_method": "gguf"}
"""The quantization_config of a GGUF file with quantized blocks."""
FLOAT_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class QuantizedLayers:
    """The layers of a quantized checkpoint by the names of their weights.

    ``export`` names the exporter that reads them, ``format`` their format: the same except for gpt-oss. ``files`` are
    the stored tensors. ``embeddings`` are stored as codes, too (GGUF); they are read as floats.
    """

    export: str
    format: str
    layers: dict[str, LayerPlan]
    files: StoredFiles
    embeddings: dict[str, LayerPlan] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The Config that plans these layers: the most common config as the global one, the others by name."""
        layers = self.layers.values()
        without_outputs = {layer.name: replace(layer.config, output_tensors=None) for layer in layers}
        common = Counter(without_outputs.values()).most_common(1)[0][0]
        floats = {name for name, tensor in self.files.tensors.items() if is_linear(name, tensor)} - self.layers.keys()
        tied = () if any(map(is_head, {*floats, *self.layers})) else ("lm_head",)
        return Config(
            global_quant_config=common,
            layer_quant_config={
                layer.name: without_outputs[layer.name] for layer in layers if without_outputs[layer.name] != common
            },
            kv_cache_quant_config={
                f"*.{layer.name.rpartition('.')[2]}": QuantizationConfig(output_tensors=layer.config.output_tensors)
                for layer in layers
                if layer.config.output_tensors
            },
            exclude=(*(name.removesuffix(".weight") for name in sorted(floats, key=natural_order)), *tied),
        )

    def layouts(self, layer: LayerPlan) -> dict[str, TensorLayout]:
        """Return the layouts of a layer's parts in its format (see ``tensor_name``)."""
        parts = EXPORTERS.get(self.export).layout(layer, self.files.model_dtype)
        return {
            part: replace(layout, shape=self.files.shape(tensor_name(layer.name, part))) if layout.is_text else layout
            for part, layout in parts.items()
        }


@dataclass(frozen=True)
class Model:
    """A model folder or GGUF file; ``dequantize.open_source`` reads its tensors.

    ``headers`` are those of the float model that it holds or represents. With an ``adapter`` it is the model into which
    that is merged: names and shapes are the same, values differ.
    """

    folder: Path
    headers: ModelHeaders
    quantized: QuantizedLayers | None = None
    adapter: Adapter | None = None


def read_model(path: Path | str, adapter: Path | None = None) -> Model:
    """Read the headers of the folder or GGUF file ``path``, and those of the folder ``adapter``.

    Raises ModelError for a damaged or unsupported model, and for an adapter that cannot be merged into it.
    """
    model = _read_base(Path(path))
    if adapter is None:
        return model
    headers = model.headers
    merged = read_adapter(adapter, Path(path), headers.config, headers.tensors)
    warned = replace(headers, warnings=(*headers.warnings, *merged.warnings))
    return replace(model, headers=warned, adapter=merged)


def _read_base(folder: Path) -> Model:
    gguf_file = find_gguf(folder)
    for path in [folder] if gguf_file is None else gguf_parts(gguf_file):
        check_files(path)
    if gguf_file is None:
        config, tensors = read_folder(folder)
        tensors = unstack_switched(tensors, str(config.get("model_type")))
        quantization_config = config.get("quantization_config") or own_settings(config) or own_description(folder)
    else:
        folder = gguf_file.parent
        config, tensors = read_gguf(gguf_file)
        quantization_config = GGUF if any(tensor.dtype in GGUF_BLOCKS for tensor in tensors.values()) else None
    warnings = _warn_of_floats(tensors)
    if not quantization_config:
        return _model(folder, config, unstack_experts(tensors), warnings)
    dtype = _float_dtype(config, tensors)
    if isinstance(quantization_config, dict) and quantization_config.get("quant_method") == GPT_OSS:
        tensors, stacks = unstack_mxfp4(tensors)
        files = StoredFiles(folder, tensors, dtype, stacks)
        quantized, used = _read_quantized(config, GPT_OSS_AS_QUARK, files, GPT_OSS)
    else:
        tensors = _with_usual_scales(tensors)
        files = StoredFiles(folder, tensors, dtype)
        quantized, used = _read_quantized(config, quantization_config, files)
    floats = {name: tensor for name, tensor in tensors.items() if name not in used}
    coded = {**quantized.layers, **quantized.embeddings}
    floats |= {name: _as_float(name, layer, files) for name, layer in coded.items()}
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", MLX_KEY)}
    warning = (
        f"The model is already quantized ({quantized.format}): its weights are decoded first, so the errors of both "
        "quantizations add up."
    )
    return _model(folder, plain, floats, (warning, *warnings), quantized)


def _warn_of_floats(tensors: Mapping[str, TensorHeader]) -> tuple[str, ...]:
    """Return a warning if tensors that are read as floats are in blocks of GGUF."""
    types = Counter(tensor.blocks for tensor in tensors.values() if tensor.blocks is not None)
    if not types:
        return ()
    return (f"{types.total()} tensor(s) are quantized already and are read as floats: {', '.join(sorted(types))}.",)


def _model(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, TensorHeader],
    warnings: tuple[str, ...] = (),
    quantized: QuantizedLayers | None = None,
) -> Model:
    untied, more = untie_own_head(config, tensors)
    stored = {tensor.file for tensor in (quantized.files.tensors if quantized else tensors).values()}
    besides = warn_of_besides(folder, str(config["model_type"]), stored)
    stored_bytes = None if quantized is None else sum(map(_bytes_in_file, quantized.files.tensors.values()))
    headers = ModelHeaders(untied, tensors, (*warnings, *more, *besides), stored_bytes=stored_bytes)
    return Model(folder, headers, quantized)


def _bytes_in_file(tensor: TensorHeader) -> int:
    return tensor.num_bytes if tensor.blocks is None else tensor.end - tensor.begin


def _with_usual_scales(tensors: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors with DeepSeek-V4's ``scale`` of a weight's blocks under the name of DeepSeek-V3's."""
    in_blocks = {
        f"{module}.scale"
        for name, tensor in tensors.items()
        if (module := name.removesuffix(".weight")) != name and tensor.dtype in ("F8_E4M3", "I8")
    }
    return {
        f"{name.removesuffix('scale')}weight_scale_inv" if name in in_blocks else name: tensor
        for name, tensor in tensors.items()
    }


def _read_quantized(
    config: dict[str, Any], quantization_config: Any, files: StoredFiles, format_name: str | None = None
) -> tuple[QuantizedLayers, set[str]]:
    """Return the quantized layers and the names of all their tensors. ``format_name`` is by default the exporter's."""
    importers = {name: exporter for name in EXPORTERS if isinstance(exporter := EXPORTERS.get(name), Importer)}
    if not isinstance(quantization_config, dict):
        quantization_config = {}
    export = next((name for name, importer in importers.items() if importer.matches(quantization_config)), None)
    if export is None:
        raise ModelError(
            f"The model is already quantized, in an unsupported format:"
            f" quant_method '{quantization_config.get('quant_method', 'unknown')}'.",
            code="already_quantized",
            hint=f"Provide the float model it was made from, or one of {', '.join(importers)}.",
        )
    try:
        stored_layers = importers[export].read_layers(quantization_config, files)
        blocks = find_blocks(files.tensors, config)
        layers = {
            f"{name}.weight": LayerPlan(
                name,
                blocks.number_of(name),
                stored.shape,
                stored.config,
                chosen_by="kv_cache_quant_config" if stored.config.output_tensors else "quantization_config",
                in_cache=holds_keys_or_values(name, files.tensors),
            )
            for name, stored in sorted(stored_layers.items(), key=lambda item: natural_order(item[0]))
        }
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, ConfigError, re.error) as error:
        raise ModelError(
            f"quantization_config in config.json cannot be read as {export}: {error!r}.",
            code="invalid_quantization_config",
            hint="Provide the float model it was made from.",
        ) from error
    if hollow := next((layer for layer in layers.values() if len(layer.shape) < 2 or 0 in layer.shape), None):
        raise ModelError(
            f"'{hollow.name}' has the invalid shape {list(hollow.shape)}.",
            code="config_implausible",
            hint="The files and config.json do not match.",
        )
    odd = [name for name, layer in layers.items() if not is_linear(name, _as_float(name, layer, files))]
    embeddings = {name: layers.pop(name) for name in odd}
    if not layers:
        raise ModelError(
            f"config.json says that the model is quantized ({export}), but the files contain no layer in that format.",
            code="config_implausible",
            hint="The files and config.json do not match.",
        )
    quantized = QuantizedLayers(export, format_name or export, layers, files, embeddings)
    coded = (*layers.values(), *embeddings.values())
    return quantized, {name for layer in coded for name in _checked_names(quantized, layer)}


def _checked_names(quantized: QuantizedLayers, layer: LayerPlan) -> Iterator[str]:
    """Yield the names of a layer's tensors. Raises ModelError if one has another shape than its config requires."""
    for part, expected in quantized.layouts(layer).items():
        name = tensor_name(layer.name, part)
        shape = quantized.files.shape(name)
        if math.prod(shape) != math.prod(expected.shape):
            raise ModelError(
                f"'{name}' has the shape {list(shape)}, but quantization_config requires {list(expected.shape)}.",
                code="config_implausible",
                hint="The files and config.json do not match.",
            )
        yield name


def _float_dtype(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype in FLOAT_NAMES:
        return FLOAT_NAMES[str(dtype)]
    kinds = Counter(tensor.dtype for name, tensor in tensors.items() if "norm" in name)
    return max(kinds, key=lambda dtype: kinds[dtype], default="BF16")


def _as_float(name: str, layer: LayerPlan, files: StoredFiles) -> TensorHeader:
    """Return the header of a weight in the model's dtype, in a stack of experts or by itself; it has no file."""
    size = math.prod(layer.shape) * DTYPE_BYTES[files.model_dtype]
    stack = files.stacks.get(name)
    if stack is None:
        return TensorHeader(files.model_dtype, layer.shape, "", 0, size)
    begin = int(name.split(".experts.")[1].split(".")[0]) * size
    return TensorHeader(files.model_dtype, layer.shape, "", begin, begin + size, transposed=True, stack=stack)
