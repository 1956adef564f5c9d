"""ONNX: the graph of a quantized model, and the files that hold it."""

from quantcore.export.onnx.onnx_exporter import OnnxExporter as OnnxExporter
