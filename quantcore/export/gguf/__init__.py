"""GGUF: reads models from it and writes models to it."""

from quantcore.export.gguf.exporter import GgufExporter as GgufExporter
