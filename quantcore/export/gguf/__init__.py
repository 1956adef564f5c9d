"""GGUF: reading models from it, and writing them to it."""

from quantcore.export.gguf.exporter import GgufExporter as GgufExporter
