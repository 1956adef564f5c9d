"""Into how many chunks the windows of a text are cut, so that sums over them do not depend on who adds. No torch."""

from __future__ import annotations

MAX_CHUNKS = 8
"""More ranks than this learn nothing more at a time."""
CHUNK_WINDOWS = 16
"""A chunk has at least so many."""


def count_chunks(num_windows: int) -> int:
    """A power of two, whatever the number of ranks."""
    chunks = 1
    while chunks < MAX_CHUNKS and 2 * chunks * CHUNK_WINDOWS <= num_windows:
        chunks *= 2
    return chunks


def count_sums(num_windows: int, num_ranks: int = 1) -> int:
    """Of one input that a rank has in memory at a time while it learns, at most: one a level of the tree in which they
    are added, and one more if its chunks begin amid a pair."""
    share = -(-count_chunks(num_windows) // num_ranks)
    return share.bit_length() + (num_ranks & (num_ranks - 1) > 0 and share > 1)
