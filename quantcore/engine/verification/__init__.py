"""Reads the written files again in a fresh process, and judges them."""
