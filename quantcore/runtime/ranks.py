"""The processes that do one job together, each on its share of the windows and layers (``torchrun`` starts them).

One process is the special case: it talks to nobody, and torch.distributed is not loaded. Whatever is put together from
several ranks is put together in the same order whatever their number: the result has the same bits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from typing import Any, TypeVar

import torch

from quantcore.errors import RankError
from quantcore.runtime.devices import default_device

PR_SET_PDEATHSIG = 1
T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""How long a rank waits for the others: longer than the slowest layer. One that dies is seen at once."""


@dataclass(frozen=True)
class Ranks:
    """All processes of a job, seen from one of them. Every method but ``part`` is called by all, in the same order.

    Values travel as pickles through the host's memory, tensors in them included, between processes that trust each
    other: they are one job.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> range:
        """Which of ``count`` things are this rank's: neighbours, in the order of the ranks. It may be none."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def share(self, value: T, owner: int = 0) -> T:
        """What the ``owner`` gives, on every rank; what the others give is dropped."""
        if self.size == 1:
            return value
        packed = [_pack(value) if self.rank == owner else None]
        with _talking():
            torch.distributed.broadcast_object_list(packed, src=owner)
        return value if self.rank == owner else _unpack(packed[0])

    def gather(self, value: T) -> list[T]:
        """What all ranks give, in their order, on every rank. For what is small."""
        if self.size == 1:
            return [value]
        packed: list[Any] = [None] * self.size
        with _talking():
            torch.distributed.all_gather_object(packed, _pack(value))
        return [value if rank == self.rank else _unpack(one) for rank, one in enumerate(packed)]

    def to_first(self, values: Sequence[T]) -> Iterator[T]:
        """The values of all ranks in their order, one at a time, on the first rank; nothing on the others."""
        if not self.is_first:
            for value in (len(values), *values):
                with _talking():
                    torch.distributed.send_object_list([_pack(value)], dst=0)
            return
        yield from values
        for rank in range(1, self.size):
            for _ in range(self._receive(rank)):
                yield self._receive(rank)

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            with _talking():
                torch.distributed.barrier()

    @staticmethod
    def _receive(rank: int) -> Any:
        packed: list[Any] = [None]
        with _talking():
            torch.distributed.recv_object_list(packed, src=rank)
        return _unpack(packed[0])


ALONE = Ranks()


def _pack(value: object) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: Any) -> Any:
    """With its tensors on this rank's device."""
    return torch.load(BytesIO(packed), map_location=default_device(), weights_only=False)


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, this process being one of them; ``ALONE`` without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    backend = "gloo"
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = default_device().type  # values go through the host; slices of weights from device to device
        backend = f"cpu:gloo,{device}:{torch.distributed.get_default_backend_for_device(device)}"
    _end_with_parent()
    torch.distributed.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Ranks(int(os.environ["RANK"]), size)
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _talking() -> Iterator[None]:
    """Raises RankError if another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


@contextmanager
def computing_together() -> Iterator[None]:
    """Raises RankError if another rank does not answer while a model talks to it; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise _lost(error) from error
        raise


def _lost(error: RuntimeError) -> RankError:
    return RankError(
        "Another process of this job ended, or does not answer.",
        code="rank_lost",
        hint=f"What it said itself says more. Start the job again. (torch.distributed: {str(error)[:200]})",
        retryable=True,
    )


def _end_with_parent() -> None:
    """The kernel kills this process when its launcher is gone (prctl(2)): ``torchrun`` gives each rank a session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
