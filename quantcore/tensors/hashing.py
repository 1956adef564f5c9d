"""Digests of tensors, computed in threads during other work: hashing a block takes as long as reading or solving it.

The digest of a tensor is the SHA-256 of the SHA-256s of its parts, so that several threads can hash one large tensor.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore

import torch

PART_BYTES = 16 << 20
"""Bytes of a tensor that are hashed, and come from a GPU, at a time."""
MOST_THREADS = 8
PARTS_AHEAD = 2
"""Number of parts that wait or are hashed, for each thread. They hold their tensors."""


class Hashing:
    """Puts the digests of tensors into mappings: in threads, or one after the other if ``num_threads`` is 1."""

    def __init__(self, num_threads: int) -> None:
        num_threads = min(num_threads, MOST_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, "hashing") if num_threads > 1 else None
        self._free = BoundedSemaphore(PARTS_AHEAD * num_threads)
        self._waiting: deque[tuple[MutableMapping[str, str], str, list[Future[bytes]]]] = deque()

    def add(self, digests: MutableMapping[str, str], name: str, tensor: torch.Tensor) -> None:
        """Set ``digests[name]`` by the next ``settle``; waits while too many parts are to be hashed."""
        if self._pool is None:
            digests[name] = tensor_digest(tensor)
            return
        is_ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        futures = []
        for part in _parts(tensor):
            self._free.acquire()
            futures.append(self._pool.submit(_digest_of_part, part, is_ready))
            futures[-1].add_done_callback(lambda _: self._free.release())
        self._waiting.append((digests, name, futures))
        while self._waiting and all(future.done() for future in self._waiting[0][2]):
            self._take(*self._waiting.popleft())

    def settle(self) -> None:
        """Wait for all digests. Raises what a computation raised."""
        while self._waiting:
            self._take(*self._waiting.popleft())

    def _take(self, digests: MutableMapping[str, str], name: str, futures: Iterable[Future[bytes]]) -> None:
        digests[name] = _digest_of_all(future.result() for future in futures)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes in row-major order, computed in this thread."""
    return _digest_of_all(_digest_of_part(part, None) for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the bytes of a tensor in parts of ``PART_BYTES``, as views."""
    return torch.split(tensor.detach().contiguous().view(-1).view(torch.uint8), PART_BYTES)


def _digest_of_all(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_of_part(part: torch.Tensor, is_ready: torch.Event | None) -> bytes:
    """Return the digest of some bytes. On a GPU they are complete at an event, and no other work there waits."""
    if is_ready is None:
        return hashlib.sha256(part.cpu().numpy().data).digest()
    stream = torch.cuda.Stream(part.device)  # type: ignore[no-untyped-call]
    stream.wait_event(is_ready)
    here = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(stream):
        here.copy_(part, non_blocking=True)
        stream.synchronize()
    return hashlib.sha256(here.numpy().data).digest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order, as anyone computes it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
