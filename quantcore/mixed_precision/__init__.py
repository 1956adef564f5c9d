"""Mixed precision: the scheme of each layer is chosen from what quantizing it costs."""
