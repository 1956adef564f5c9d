"""Kernels in Triton, for loops and chains of operations on a GPU that would take launches and passes over memory.

Each computes what torch computes elsewhere, rounded in the order in which a plain loop would. Where they are not used,
torch computes operation by operation. Tests run them on the CPU, in Triton's interpreter.
"""
