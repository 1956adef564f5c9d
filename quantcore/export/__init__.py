"""Exporters: one file per on-disk format. Importing them needs no torch, so that a plan can be checked without it."""

from __future__ import annotations

from collections.abc import Sequence

from quantcore.config import Config
from quantcore.export.exporter import EXPORTERS, Container, Decoder, Exporter, Uniform, holds_codes, tensor_name
from quantcore.layer import LayerPlan

__all__ = [
    "EXPORTERS", "Container", "Decoder", "Exporter", "Uniform", "adapted", "formats_for", "holds_codes", "tensor_name",
]  # fmt: skip

USUAL_SHAPE = (4096, 4096)


def formats_for(config: Config) -> list[str]:
    """The formats that can hold a layer of a usual shape with the global config; those without codes come last."""
    layer = LayerPlan("layer", 0, USUAL_SHAPE, config.global_quant_config)
    fitting = [name for name in EXPORTERS if layer.config.weight is not None and not EXPORTERS.get(name).refuse(layer)]
    return sorted(fitting, key=holds_codes, reverse=True)


def adapted(layers: tuple[LayerPlan, ...], exports: Sequence[str]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    """The layers as formats in files of their own kind need them, and what to say of that."""
    said: tuple[str, ...] = ()
    for export in exports:
        if isinstance(exporter := EXPORTERS.get(export), Container):
            layers, more = exporter.adapt(layers)
            said += more
    return layers, said
