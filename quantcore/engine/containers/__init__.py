"""Files other than safetensors: GGUF and ONNX; and quantized files as float tensors."""
