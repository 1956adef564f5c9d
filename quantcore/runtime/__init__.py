"""Runs a model block by block: devices, ranks, shards, hidden states, memory."""
