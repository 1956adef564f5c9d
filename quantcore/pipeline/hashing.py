"""Digests of weights, computed while the GPU solves the next ones: hashing a block takes longer than reading it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore

import torch

from quantcore.checkpoint.artifact import digest

AT_ONCE = 2
"""Number of weights that are hashed at the same time. Each is held until then."""


class Hashing:
    """Puts the digests of tensors into dicts. On the CPU it does it at once, since the job has all threads."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._free = BoundedSemaphore(AT_ONCE)
        self._waiting: list[tuple[dict[str, str], str, Future[str]]] = []

    def add(self, digests: dict[str, str], name: str, tensor: torch.Tensor) -> None:
        """Set ``digests[name]`` by the next ``settle``; waits while others are hashed."""
        if tensor.is_cpu:
            digests[name] = digest(tensor)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, "hashing")
        self._free.acquire()
        future = self._pool.submit(digest, tensor)
        future.add_done_callback(lambda _: self._free.release())
        self._waiting.append((digests, name, future))

    def settle(self) -> None:
        """Wait for all digests. Raises what a computation raised."""
        for digests, name, future in self._waiting:
            digests[name] = future.result()
        self._waiting.clear()
