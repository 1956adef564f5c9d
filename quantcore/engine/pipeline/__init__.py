"""A quantization job from start to end."""
