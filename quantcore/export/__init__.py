"""Exporters: one file per on-disk format. Importing them needs no torch, so that a plan can be checked without it."""

from __future__ import annotations

from quantcore.export.exporter import EXPORTERS, Exporter, tensor_name

__all__ = ["EXPORTERS", "Exporter", "tensor_name"]
