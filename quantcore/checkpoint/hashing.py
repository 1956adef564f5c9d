"""Digests of tensors, computed in threads beside other work: hashing a block takes as long as reading or solving it."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore

import torch

from quantcore.checkpoint.artifact import digest

AT_ONCE = 2
"""Number of tensors that are hashed at the same time. Each is held until then."""
CHUNK_BYTES = 64 << 20
"""Bytes that come from a GPU at a time."""


class Hashing:
    """Puts the digests of tensors into mappings; one after the other if not ``in_threads``."""

    def __init__(self, *, in_threads: bool) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, "hashing") if in_threads else None
        self._free = BoundedSemaphore(AT_ONCE)
        self._waiting: list[tuple[MutableMapping[str, str], str, Future[str]]] = []

    def add(self, digests: MutableMapping[str, str], name: str, tensor: torch.Tensor) -> None:
        """Set ``digests[name]`` by the next ``settle``; waits while others are hashed."""
        if self._pool is None:
            digests[name] = digest(tensor)
            return
        self._free.acquire()
        tensor = tensor.detach().contiguous()
        if tensor.is_cuda:
            future = self._pool.submit(_digest_of_cuda, tensor, torch.cuda.current_stream(tensor.device).record_event())
        else:
            future = self._pool.submit(digest, tensor)
        future.add_done_callback(lambda _: self._free.release())
        self._waiting.append((digests, name, future))

    def settle(self) -> None:
        """Wait for all digests. Raises what a computation raised."""
        for digests, name, future in self._waiting:
            digests[name] = future.result()
        self._waiting.clear()


def _digest_of_cuda(tensor: torch.Tensor, is_ready: torch.Event) -> str:
    """Return the digest of a tensor that is complete at an event, without making other work on its GPU wait."""
    found = hashlib.sha256()
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    stream.wait_event(is_ready)
    flat = tensor.view(-1).view(torch.uint8)
    chunk = torch.empty(min(CHUNK_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        for part in torch.split(flat, CHUNK_BYTES):
            chunk[: len(part)].copy_(part, non_blocking=True)
            stream.synchronize()
            found.update(chunk[: len(part)].numpy().data)
    return found.hexdigest()
