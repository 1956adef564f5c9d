"""Measures: perplexity, divergence, clipping, samples, tasks."""
