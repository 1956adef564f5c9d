"""Converts a quantized checkpoint to another format with the same codes and scales, or reports what would be lost."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantcore.checkpoint.artifact import building, seal, write_json
from quantcore.checkpoint.side_files import copy_side_files
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.containers.dequantize import open_source, read_layer
from quantcore.engine.containers.nvfp4 import AsNvfp4, plan_nvfp4
from quantcore.engine.data.tokenizer import unpack_tokenizer
from quantcore.engine.model.module_names import with_module_names
from quantcore.errors import ConfigError, ProofError
from quantcore.events import Completed, Emit, PhaseStarted, Progress
from quantcore.export import (
    EXPORTERS,
    Container,
    check_exports,
    check_fitted,
    encoded,
    file_layouts,
    holds_codes,
    json_files,
)
from quantcore.importing.model import Model, QuantizedLayers, read_model
from quantcore.plan.planner import written_layout
from quantcore.tensors.hashing import tensor_digest
from quantcore.tensors.qtensor import QLayer
from quantcore.tensors.sink import Sink


def convert(model_dir: Path, output_dir: Path, export: str, emit: Emit, *, with_nvfp4: bool = False) -> dict[str, Any]:
    """Write the quantized model in ``model_dir`` as ``export`` to ``output_dir``, which appears whole or not at all.

    One layer is in memory at a time. The written files are read again and compared. ``with_nvfp4``: weights in MXFP4
    are written as NVFP4 (see ``containers.nvfp4``). Returns a summary. Raises ConfigError for a float model, the same
    format, or layers that ``export`` cannot hold; ModelError for a folder that cannot be read; ProofError if the files
    differ.
    """
    emit(PhaseStarted("plan"))
    model = read_model(model_dir)
    quantized = _check(model, export, is_recoded=with_nvfp4)
    coded = _recoded(quantized, emit) if with_nvfp4 else AsNvfp4(quantized.layers, {})
    layers = tuple(coded.layers.values())
    _check_layers(model, layers, export)
    with building(output_dir) as folder:
        emit(PhaseStarted("export"))
        digests = _write(model, quantized, coded, export, folder, emit)
        config = replace(quantized, layers=coded.layers).config
        named, kept = with_module_names(model.headers.config, layers, config.exclude)
        for name, content in json_files(export, model.headers.config, config, named, kept).items():
            write_json(folder / name, content)
        copy_side_files(model_dir, folder)
        unpack_tokenizer(model_dir, folder)
        emit(PhaseStarted("verify"))
        _verify(folder, digests)
        seal(folder)
    summary = {"from": quantized.format, "to": export, "num_layers": len(layers), "num_tensors_equal": len(digests)}
    emit(Completed(summary))
    return summary


def _recoded(quantized: QuantizedLayers, emit: Emit) -> AsNvfp4:
    return plan_nvfp4(quantized, lambda done, total: emit(Progress("plan", done, total, "tensor", None)))


def _check(model: Model, export: str, *, is_recoded: bool) -> QuantizedLayers:
    quantized = model.quantized
    if quantized is None:
        raise ConfigError(
            f"The model in {model.folder} is not quantized, so there is nothing to convert.",
            code="not_quantized",
            hint="Quantize it first: bitfoundry quantize MODEL PRESET --model_export FORMAT",
        )
    if quantized.embeddings:
        raise ConfigError(
            f"'{min(quantized.embeddings)}' in {model.folder} is quantized, but {export} stores embeddings in the"
            f" model's float dtype, which would round them.",
            code="incompatible_export",
            hint="Quantize the original model instead: bitfoundry quantize MODEL PRESET --model_export FORMAT",
            field="/export",
        )
    if isinstance(EXPORTERS.get(export), Container):
        raise ConfigError(
            f"{export} can only be written from float weights.",
            code="incompatible_export",
            hint=f"Quantize the original model: bitfoundry quantize --model_export {export}.",
            field="/export",
        )
    if export == quantized.format and not is_recoded:
        raise ConfigError(
            f"The model in {model.folder} is already in the {export} format.",
            code="invalid_export",
            hint="Copy the folder.",
        )
    return quantized


def _check_layers(model: Model, layers: tuple[LayerPlan, ...], export: str) -> None:
    """Raise ConfigError ``incompatible_export`` for layers that ``export`` cannot hold."""
    check_exports(layers, (export,))
    check_fitted(layers, export)
    active = next((layer for layer in layers if layer.input_tensors or layer.config.output_tensors), None)
    if active is not None and not holds_codes(export):
        raise ConfigError(
            f"{export} stores only weights, but {active.name} has quantized activations ({active.scheme}).",
            code="incompatible_export",
            hint="Choose a format that stores activation scales.",
            field="/export",
        )


def _write(
    model: Model, quantized: QuantizedLayers, coded: AsNvfp4, export: str, folder: Path, emit: Emit
) -> dict[str, str]:
    """Write all tensors; return digests of the values that they stand for, by the names of the float model."""
    exporter, dtype, source = EXPORTERS.get(export), quantized.files.model_dtype, open_source(model)
    tensors = model.headers.tensors
    layouts = written_layout(export, tuple(coded.layers.values()), tensors, model.headers.config)
    layouts, parts = file_layouts(exporter, model.headers.config, layouts)
    digests: dict[str, str] = {}
    with closing(Sink(folder, layouts, tensors=parts if holds_codes(export) else tensors)) as sink:
        for count, name in enumerate(tensors, start=1):
            if (layer := quantized.layers.get(name)) is None:
                tensor = source.read(name)
                sink.write(name, tensor)
                digests[name] = tensor_digest(tensor)
            else:
                qlayer = read_layer(quantized, layer)
                written = coded.recoded(name, qlayer)
                for part, tensor in encoded(exporter, coded.layers[name], written, dtype).items():
                    sink.write(part, tensor.to(sink.dtype_of(part)))
                digests[name] = tensor_digest(_whole(qlayer) if holds_codes(export) else source.read(name))
            emit(Progress("export", count, len(tensors), "tensor", None))
        sink.finish()
    return digests


def _verify(folder: Path, digests: dict[str, str]) -> None:
    """Raise ProofError if the files in ``folder`` do not hold the values with these ``digests``."""
    written = read_model(folder)
    source, layers = open_source(written), {} if written.quantized is None else written.quantized.layers
    if set(written.headers.tensors) != set(digests):
        raise ProofError("The files do not contain the tensors that were written.", code="proof_layout_differs")
    for name, value in digests.items():
        layer = layers.get(name)
        if written.quantized is None or layer is None:
            tensor = source.read(name)
        else:
            tensor = _whole(read_layer(written.quantized, layer))
        if tensor_digest(tensor) != value:
            raise ProofError(
                f"'{name}' differs between the files and what was written.",
                code="proof_tensor_differs",
                hint="Please report this bug. No output was kept.",
            )


def _whole(layer: QLayer) -> torch.Tensor:
    """Return the values of a layer as one row of float32: its weight, and the parameters of its activations."""
    static = [params for params in (layer.inputs, layer.outputs) if params is not None]
    parts = [part for params in static for part in (params.scale, params.zero_point) if part is not None]
    scales = [part.flatten().float() for part in parts]
    return torch.cat([layer.weight.dequantize().flatten(), *scales])
