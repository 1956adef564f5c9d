"""Automatic mixed precision: the scheme of each layer, chosen for a size or a quality from what was measured."""
