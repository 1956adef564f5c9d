"""Rotations of the residual stream: recorded, folded into weights, simulated."""
