"""How much is computed at a time, which bounds the memory; what it takes to solve weights by GPTQ and its kin, and how
ranks divide that among them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

SOLVED_ROWS = 4096
"""GPTQ solves so many rows of weights at a time, which bounds the memory. Ranks may divide weights between tiles."""
NUM_PROBES = 2
"""Windows whose logits are compared between the model in memory and the files."""
PROBE_POSITIONS = 16
"""The last positions of such a window: those that are compared."""
LOGIT_ROWS = 128
"""Positions of a window whose logits are computed at a time."""
TILE_BYTES = 8 << 20
"""Large matrices and logits are cut into tiles of so many bytes in float32."""


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


STATES_SHARE = 0.25
"""Share of the free memory that the hidden states of all windows may take; else they wait on disk."""


MAX_CHUNKS = 8
"""More ranks than this learn nothing more at a time."""


CHUNK_WINDOWS = 16
"""A chunk has at least so many."""


def count_chunks(num_windows: int) -> int:
    """Return the number of chunks: a power of two that does not depend on the number of ranks."""
    chunks = 1
    while chunks < MAX_CHUNKS and 2 * chunks * CHUNK_WINDOWS <= num_windows:
        chunks *= 2
    return chunks


def count_sums(num_windows: int, num_ranks: int = 1) -> int:
    """Upper bound on the partial sums a rank holds per input: one a tree level, plus one if its first chunk is odd."""
    share = -(-count_chunks(num_windows) // num_ranks)
    return share.bit_length() + (num_ranks & (num_ranks - 1) > 0 and share > 1)
