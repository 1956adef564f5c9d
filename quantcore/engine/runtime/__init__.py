"""Devices, ranks, hidden states, and one block in memory at a time."""
