"""Edges of a block: pairs of layers between which a scale can be folded, found by tracing and proven."""
