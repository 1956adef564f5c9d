"""Arithmetic on tensors and codes, and the files that hold them."""
