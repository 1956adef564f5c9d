"""How much is computed at a time, which bounds the memory; what it takes to solve weights by GPTQ and its kin, and how
ranks divide that among them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

SOLVED_ROWS = 4096
"""Of weights, that GPTQ and its kin take at a time: it bounds the memory. Between such pieces ranks may divide them."""
NUM_PROBES = 2
"""Windows whose logits are compared between the model in memory and the files."""
PROBE_POSITIONS = 16
"""The last positions of such a window: those that are compared."""
LOGIT_ROWS = 128
"""Positions of a window whose logits are computed at a time."""
PIECE_BYTES = 8 << 20
"""Of float32 values that a large matrix, or logits, are cut into."""


def solving_flops(width: int, num_outputs: int) -> tuple[float, float]:
    """(the factorization of the matrix of an input of ``width``, the codes of ``num_outputs`` rows that read it)."""
    return 4 / 3 * width**3, 2.0 * num_outputs * width**2


def too_large_for_one(costs: Sequence[float], num_ranks: int) -> set[int]:
    """Which of the inputs that are solved side by side take more than a rank's share of the time: there the others
    would wait, so all ranks solve it together, each some rows."""
    if num_ranks == 1:
        return set()
    share = sum(costs) / num_ranks
    return {number for number, cost in enumerate(costs) if cost > share}
