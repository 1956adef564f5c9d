"""Finds and proves the pairs of layers between which scales can be folded."""
