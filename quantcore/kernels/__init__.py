"""Kernels in Triton, for loops on a GPU whose launches would take longer than their work.

Each computes what torch computes elsewhere, rounded in the order in which a plain loop would. Where they are not used,
torch computes operation by operation. Tests run them on the CPU, in Triton's interpreter.
"""
