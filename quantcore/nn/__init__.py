"""Quantizes models in memory, and exports them."""
