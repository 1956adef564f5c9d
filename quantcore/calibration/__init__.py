"""Calibration learns statistics of inputs and ranges of activations from text."""
