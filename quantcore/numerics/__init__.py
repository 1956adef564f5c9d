"""The arithmetic of quantization: scales and zero points, quantized tensors, layouts of weights."""
