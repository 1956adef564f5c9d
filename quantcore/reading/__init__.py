"""Reads any model folder as floating-point tensors: safetensors, GGUF, or quantized in a supported format."""
