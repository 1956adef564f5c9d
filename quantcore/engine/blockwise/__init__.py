"""The algorithms of one block."""
