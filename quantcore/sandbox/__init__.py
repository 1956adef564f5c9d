"""Limits on what a process may open, and when it ends."""
