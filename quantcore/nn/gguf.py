"""Writes a GGUF file from a frozen model in memory (``ModelExporter.export_gguf_model``)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantcore.checkpoint.layout import TensorHeader
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.modules.layers import QuantizedLayer, num_groups
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS, Container, FileContents, encoded, file_of, layouts_of
from quantcore.formats.weight_layout import stored as as_module_keeps
from quantcore.nn.codes import encode_layer
from quantcore.nn.layer_names import Stored
from quantcore.nn.log import log
from quantcore.tensors.affine import QParams, as_stored, minimum_of, zero_point_of
from quantcore.tensors.qtensor import QTensor
from quantcore.tensors.source import TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def export_gguf(stored: Stored, model_config: dict[str, Any], tokenizer_dir: Path, folder: Path) -> None:
    """Write model.gguf into ``folder``; ``model_config`` is config.json.

    Layers are first converted to GGUF's number types (see ``fit_to_file``). Raises ConfigError for an architecture or a
    tensor that GGUF has no place for, ModelError for a tokenizer that does not fit.
    """
    exporter = EXPORTERS.get("gguf")
    assert isinstance(exporter, Container)
    fit_to_file(stored.layers)
    plans = {name: replace(layer.plan, name=name) for name, layer in stored.layers.items()}
    dtypes = {name: DTYPE_NAMES[layer.canonical_weight().dtype] for name, layer in stored.layers.items()}
    layouts = {}
    headers = {
        name: TensorHeader(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), "", 0, tensor.nbytes)
        for name, tensor in stored.floats.items()
    }
    for name, header in headers.items():
        if (layout := exporter.float_layout(name, header, model_config)) is not None:
            layouts[name] = layout
    for name, plan in plans.items():
        layouts |= layouts_of(exporter, plan, dtypes[name])
    exporter.check(model_config, layouts)
    contents = FileContents(layouts, tuple(plans.values()), model_config, tokenizer_dir, headers)
    with closing(file_of(exporter).sink(folder, contents)) as sink:
        for message in sink.warnings:
            log.warning(message)
        for name, tensor in stored.floats.items():
            sink.write(name, tensor)
        for name, layer in stored.layers.items():
            for part, tensor in encoded(exporter, plans[name], encode_layer(layer), dtypes[name]).items():
                sink.write(part, tensor.to(sink.dtype_of(part)))
        sink.finish()


def fit_to_file(layers: dict[str, QuantizedLayer]) -> None:
    """Give ``layers`` the float16 scales and minimums of a GGUF file, in place, so that model and file agree.

    Codes stay. Nothing changes if the specs already have float16 scales and float32 zero points, as the gguf presets
    do.
    """
    exporter = EXPORTERS.get("gguf")
    assert isinstance(exporter, Container)
    moved = 0
    for layer in layers.values():
        (plan,), _ = exporter.adapt((layer.plan,))
        if plan.config != layer.plan.config:
            _refit(layer, plan)
            moved += 1
    if moved:
        log.warning(f"GGUF stores float16 scales and minimums: {moved} layer(s) now use them, in the model as well.")


def _refit(layer: QuantizedLayer, plan: LayerPlan) -> None:
    """Dequantize ``layer`` again with the scales of ``plan``. Raises ConfigError for a scale beyond float16."""
    before = encode_layer(layer).weight
    spec, dtype = plan.weight, layer.canonical_weight().dtype
    if spec.dtype is not before.spec.dtype:
        raise ConfigError(
            f"The rows of {plan.name} are not whole blocks, so GGUF cannot store its {layer.plan.scheme}.",
            code="incompatible_export",
            hint="Quantize it with another preset, such as gguf_q5_0 or gguf_q8_0.",
            field="/quant_config",
        )
    scale = as_stored(before.params.scale, spec, dtype)
    zero_point, minimum = None, torch.zeros(())
    if before.params.zero_point is not None:
        minimum = minimum_of(before.params.zero_point, before.params.scale, before.spec).half()
        zero_point = zero_point_of(minimum, scale, spec)
    if not (torch.isfinite(scale).all() and torch.isfinite(minimum).all()):
        raise ConfigError(
            f"A scale or minimum of {plan.name} exceeds the range of float16, which GGUF stores.",
            code="incompatible_export",
            hint="Exclude the layer, or export another format.",
            field="/quant_config",
        )
    params = QParams(scale, zero_point)
    weight = QTensor(before.codes, params, spec).dequantize().to(dtype)
    layer.weight_quantizer = TensorQuantizer(spec, params, is_weight=True)
    layer._parameters["weight"].data = as_module_keeps(weight, plan.kind, num_groups(layer))  # type: ignore[union-attr]
    layer.plan = plan
