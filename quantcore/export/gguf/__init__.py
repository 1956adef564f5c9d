"""GGUF: reads models from it and writes models to it."""

from quantcore.export.gguf.gguf_exporter import GgufExporter as GgufExporter
