"""Quantized modules for models in memory."""
