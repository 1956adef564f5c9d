"""What it takes to solve weights by GPTQ and its kin, and how ranks divide that among them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

SOLVED_ROWS = 4096
"""Of weights, that GPTQ and its kin take at a time: it bounds the memory. Between such pieces ranks may divide them."""


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
