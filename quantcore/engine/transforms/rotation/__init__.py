"""Rotations of the hidden states, folded into weights."""
