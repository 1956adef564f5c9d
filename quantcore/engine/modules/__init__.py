"""Quantized layers as torch modules, and a checkpoint loaded into them."""
