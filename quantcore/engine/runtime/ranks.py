"""The processes that do one job together, each on its share of the windows and layers (``torchrun`` starts them).

A single process is the special case: it does not communicate, and torch.distributed is not loaded. Values of several
ranks are combined in an order that does not depend on their number: the result has the same bits.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from typing import Any, Self, TypeVar

import torch

from quantcore.engine.runtime.devices import default_device
from quantcore.errors import RankError
from quantcore.sandbox.parent_death import end_with_parent

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""Timeout for collective operations; longer than the slowest layer takes. A rank that dies is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """All processes of a job, seen from one of them.

    Every method but ``part`` is called by all, in the same order; ``move`` at least by the two ranks involved. Values
    are sent as pickles between processes that trust each other: they are one job. Tensors are sent apart from the
    pickle, from memory to memory without a copy.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> range:
        """Return the range of ``count`` items that belong to a rank, in the order of the ranks; it may be empty."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def share(self, value: T, owner: int = 0) -> T:
        """Return the ``owner``'s value on every rank; other ranks' values are dropped."""
        if self.size == 1:
            return value
        parcel = _Parcel.of(value) if self.rank == owner else None
        with _talking():
            received = _Parcel.exchange(
                parcel,
                lambda packed: torch.distributed.broadcast_object_list(packed, src=owner),
                lambda bytes_: torch.distributed.broadcast(bytes_, src=owner),
            )
        return value if self.rank == owner else received.open()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        return [self.share(value, rank) for rank in range(self.size)]

    def move(self, things: dict[K, T], key: K, source: int, target: int) -> None:
        """Move the value under ``key`` from the rank ``source`` to ``target``; other ranks do nothing."""
        if source == target or self.rank not in (source, target):
            return
        with _talking():
            if self.rank == source:
                _Parcel.exchange(
                    _Parcel.of(things.pop(key)),
                    lambda packed: torch.distributed.send_object_list(packed, dst=target),
                    lambda bytes_: torch.distributed.send(bytes_, dst=target),
                )
                return
            parcel = _Parcel.exchange(
                None,
                lambda packed: torch.distributed.recv_object_list(packed, src=source),
                lambda bytes_: torch.distributed.recv(bytes_, src=source),
            )
        things[key] = parcel.open()

    def wait(self) -> None:
        """Wait until all ranks have arrived."""
        if self.size > 1:
            with _talking():
                torch.distributed.barrier()


ALONE = Ranks()


def spread(costs: Sequence[int], size: int) -> list[int]:
    """Return the rank of each piece of work: the costliest first, each to the rank with the least load."""
    load, owners = [0] * size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[number] = load.index(min(load))
        load[owners[number]] += costs[number]
    return owners


@dataclass(frozen=True)
class _Parcel:
    """A value pickled without its tensors, and these: on another rank each is on the host or on the device, as here."""

    pickled: bytes
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, value: object) -> Self:
        tensors: list[torch.Tensor] = []
        places: dict[int, int] = {}  # a tensor that appears twice is one tensor on the other side, too

        class Pickler(pickle.Pickler):
            def persistent_id(self, part: object) -> int | None:
                if not isinstance(part, torch.Tensor) or isinstance(part, torch.nn.Parameter):
                    return None
                if id(part) not in places:
                    places[id(part)] = len(tensors)
                    tensors.append(part)
                return places[id(part)]

        buffer = BytesIO()
        Pickler(buffer).dump(value)
        return cls(buffer.getvalue(), [tensor.detach() for tensor in tensors])

    def open(self) -> Any:
        tensors = self.tensors

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, place: int) -> torch.Tensor:
                return tensors[place]

        return Unpickler(BytesIO(self.pickled)).load()

    @classmethod
    def exchange(
        cls, own: Self | None, pass_packed: Callable[[list[Any]], object], pass_bytes: Callable[[torch.Tensor], object]
    ) -> Self:
        """Send ``own``, or receive the parcel that another rank sends."""
        packed: list[Any] = [
            own and (own.pickled, [(part.shape, part.dtype, part.device.type == "cpu") for part in own.tensors])
        ]
        pass_packed(packed)
        pickled, forms = packed[0]
        places = torch.device("cpu"), default_device()
        parcel = own or cls(
            pickled, [torch.empty(shape, dtype=dtype, device=places[not on_host]) for shape, dtype, on_host in forms]
        )
        for tensor in parcel.tensors:
            if tensor.numel():
                pass_bytes(tensor.contiguous().reshape(-1).view(torch.uint8))
        return parcel


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks that ``torchrun`` started; yields ``ALONE`` without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    backend = "gloo"
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = default_device().type  # values go through the host; shards of weights from device to device
        backend = f"cpu:gloo,{device}:{torch.distributed.get_default_backend_for_device(device)}"
    end_with_parent()
    torch.distributed.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Ranks(int(os.environ["RANK"]), size)
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _talking() -> Iterator[None]:
    """Raise RankError if another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


@contextmanager
def computing_together() -> Iterator[None]:
    """Raise RankError if another rank does not answer while a model communicates; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise _lost(error) from error
        raise


def _lost(error: RuntimeError) -> RankError:
    return RankError(
        "Another process of this job has ended or does not respond.",
        code="rank_lost",
        hint=f"See its own messages, then start the job again. (torch.distributed: {str(error)[:200]})",
        retryable=True,
    )
