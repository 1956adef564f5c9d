"""Measurements of a result beside the original: perplexity, divergence, samples, tasks, speed."""
