"""Artifacts on their way out: to a repository on the Hub, or to a folder behind an fsspec URL. No torch."""
