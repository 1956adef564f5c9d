"""Reads the tensors of the next block in a thread, while a GPU solves this one.

They wait in pinned memory of the host, from which a GPU copies them several times as fast, and without stopping the
host. Copying them ahead as well would hold one more block on the device, to save the 1 % of a block's time that its
copy takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from quantcore.engine.runtime.devices import free_memory_bytes
from quantcore.tensors.source import Source

HELD_PARTS = 8
"""A block may take 1/8 of the host's free memory: other ranks may read ahead as well."""


class ReadAhead:
    """A source whose expected tensors are read before they are asked for, if the host's memory allows it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, "reading")
        self._ahead: dict[str, Future[torch.Tensor]] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Begin to read these tensors; those that were expected before and not read are forgotten."""
        names = [name for name in names if name in self._source]
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        num_bytes = sum(self._source.tensors[name].num_bytes for name in names)
        if num_bytes <= free_memory_bytes(torch.device("cpu")) // HELD_PARTS:
            self._ahead = {name: self._pool.submit(self._read_pinned, name) for name in names}

    def _read_pinned(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        with suppress(RuntimeError):  # a system may limit pinned memory
            tensor = tensor.pin_memory()
        return tensor

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` on the CPU, in its stored dtype, once. Raises what ``Source.read`` raises."""
        future = self._ahead.pop(name, None)
        return self._source.read(name) if future is None else future.result()
