"""Any model folder as tensors in floating point: safetensors, GGUF, or quantized in a known format."""
