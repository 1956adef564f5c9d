"""Reads models: float, or quantized by Bitfoundry or another program."""
