"""Grids: the few levels on which the weights of a model lie that was dequantized. No torch."""
