"""Reads float weights from the codes of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quantcore.checkpoint.layout import TensorHeader
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.containers.merging import MergingSource
from quantcore.export import EXPORTERS, Decoder, tensor_name
from quantcore.importing.model import Model, QuantizedLayers
from quantcore.tensors.qtensor import QLayer
from quantcore.tensors.source import TORCH_DTYPES, Rows, Source, rows_of


def open_source(model: Model) -> Source:
    """Return the source that reads the tensors of ``model.headers``."""
    if model.quantized is None:
        source = Source(model.folder, model.headers.tensors)
    else:
        source = DequantizingSource(model.quantized, model.headers.tensors)
    return source if model.adapter is None else MergingSource(source, model.adapter)


class DequantizingSource(Source):
    """Reads the tensors of ``importing.Model.headers``: the weights of quantized layers in the dtype of the model."""

    def __init__(self, quantized: QuantizedLayers, tensors: dict[str, TensorHeader]) -> None:
        super().__init__(quantized.files.folder, tensors)
        self._quantized = quantized

    def read(self, name: str) -> torch.Tensor:
        layer = self._layer_of(name)
        if layer is None:
            return super().read(name)
        restored = read_layer(self._quantized, layer).weight.dequantize()
        return restored.to(TORCH_DTYPES[self._quantized.files.model_dtype])

    def expect(self, names: Iterable[str]) -> None:
        stored: list[str] = []
        for name in names:
            layer = self._layer_of(name)
            if layer is None:
                stored.append(name)
            else:
                stored += [tensor_name(layer.name, part) for part in self._quantized.layouts(layer)]
        _stored(self._quantized).expect(stored)

    def read_rows(self, name: str, rows: range) -> torch.Tensor:
        if self._layer_of(name) is not None:
            return self.read(name)[rows.start : rows.stop]
        return super().read_rows(name, rows)

    def rows(self, name: str) -> Rows:
        return super().rows(name) if self._layer_of(name) is None else rows_of(self.read(name))

    def _layer_of(self, name: str) -> LayerPlan | None:
        return self._quantized.layers.get(name) or self._quantized.embeddings.get(name)


def read_layer(quantized: QuantizedLayers, layer: LayerPlan) -> QLayer:
    """Return the codes of ``layer`` with their parameters, decoded from the files."""
    exporter = EXPORTERS.get(quantized.export)
    assert isinstance(exporter, Decoder)
    source = _stored(quantized)
    parts = {
        part: source.read(tensor_name(layer.name, part)).view(layout.shape)
        for part, layout in quantized.layouts(layer).items()
    }
    return exporter.decode(layer, parts)


def _stored(quantized: QuantizedLayers) -> Source:
    """Return a source that reads the tensors as stored in the files."""
    return Source(quantized.files.folder, dict(quantized.files.tensors))
