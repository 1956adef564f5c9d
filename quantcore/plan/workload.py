"""Sizes of work steps, which bound the memory; costs of GPTQ-like solvers, and their division among ranks. No torch."""

from __future__ import annotations

from collections.abc import Sequence

SOLVED_ROWS = 4096
"""Number of rows of weights that GPTQ solves at a time.

It bounds the memory. Ranks may divide weights between tiles.
"""
KERNEL_INPUTS = 64
"""Number of inputs whose weights a kernel on a GPU rounds one after the other, in one launch."""
COUPLED_ROWS = 4096
"""Largest number of a layer's outputs whose gradients are compared with each other.

It bounds the memory: a layer with more outputs gets several matrices.
"""
NUM_PROBES = 2
"""Number of windows whose logits are compared between the model in memory and the files."""
PROBE_POSITIONS = 16
"""Number of last positions of such a window that are compared."""
LOGIT_ROWS = 128
"""Number of positions of a window whose logits are computed at a time."""
PART_BYTES = 32 << 20
"""Size in float32 of the parts of a head's weight that are in memory at a time on a CPU. Accelerators get more work at
a time: 8 times as much."""
PART_TOKENS = 16384
"""Largest number of tokens of the vocabulary in such a part."""
PART_ROWS = 512
"""Number of positions of a window whose logits for a part of the vocabulary are computed at a time."""
TILE_BYTES = 8 << 20
"""Size in float32 of the tiles into which large matrices, and logits on an accelerator, are divided."""
CACHED_TILE_BYTES = 2 << 20
"""Size in float32 of the tiles of logits on a CPU, whose caches hold it: a dozen operations read each tile again."""


def part_size(width: int, *, on_host: bool) -> int:
    """Return the number of tokens whose rows [H] of a head's weight are in memory at a time, for ``width`` H."""
    return max(1, min(PART_TOKENS, PART_BYTES // (4 * width))) * (1 if on_host else 8)


def solving_flops(width: int, num_outputs: int) -> tuple[float, float]:
    """Return the cost of (a factorization for ``width`` inputs, the codes of ``num_outputs`` rows)."""
    return 4 / 3 * width**3, 2.0 * num_outputs * width**2


def output_blocks(num_outputs: int) -> list[slice]:
    """Divide a layer's outputs evenly into blocks of at most ``COUPLED_ROWS``."""
    count = -(-num_outputs // COUPLED_ROWS)
    size = -(-num_outputs // count)
    return [slice(start, min(start + size, num_outputs)) for start in range(0, num_outputs, size)]


def count_coupled(num_outputs: int) -> int:
    """Return the number of values of the matrices for the ``output_blocks``."""
    return sum((rows.stop - rows.start) ** 2 for rows in output_blocks(num_outputs))


def too_large_for_one(costs: Sequence[float], num_ranks: int) -> set[int]:
    """Return the inputs that cost more than a rank's share of the time if each is solved by one rank.

    The other ranks would wait for it, so all ranks solve such an input together, each some rows.
    """
    if num_ranks == 1:
        return set()
    share = sum(costs) / num_ranks
    return {number for number, cost in enumerate(costs) if cost > share}


STATES_SHARE = 0.25
"""Share of the free memory that the hidden states of all windows may take; larger ones are stored on disk."""


KEPT_STATES_BYTES = 256 << 20
"""Largest size of the hidden states before all blocks, for a pass backward, that is kept in memory."""
WINDOWS_PER_STEP = 2
"""Number of windows of one step of distillation. On SmolLM2 at 2 bits, 32 steps of 2 windows divided the divergence by
1.2 to 1.3."""


MAX_CHUNKS = 8
"""Upper bound on the chunks; no more ranks than this can calibrate at a time."""


CHUNK_WINDOWS = 16
"""Lower bound on the windows of a chunk."""


def count_chunks(num_windows: int) -> int:
    """Return the number of chunks: a power of two that does not depend on the number of ranks."""
    chunks = 1
    while chunks < MAX_CHUNKS and 2 * chunks * CHUNK_WINDOWS <= num_windows:
        chunks *= 2
    return chunks


def count_sums(num_windows: int, num_ranks: int = 1) -> int:
    """Return an upper bound on a rank's partial sums per input.

    There is one a tree level, plus one if its first chunk is odd.
    """
    share = -(-count_chunks(num_windows) // num_ranks)
    return share.bit_length() + (num_ranks & (num_ranks - 1) > 0 and share > 1)
