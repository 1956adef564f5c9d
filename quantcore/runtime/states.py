"""Where hidden states wait for their block: in memory, or in a file if they would take too much of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any

import torch

from quantcore.runtime.devices import free_memory_bytes

SHARE = 0.25
"""Of the free memory: what the hidden states of all streams may take."""

States = MutableSequence[torch.Tensor]


def states_kept(num_bytes: int, device: torch.device, folder: Path) -> States:
    """An empty sequence for states of ``num_bytes`` in all: a list, or beyond the limit a file beside ``folder``'s."""
    return [] if num_bytes <= SHARE * free_memory_bytes(device) else StatesOnDisk(folder)


def copied(states: States, change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> States:
    """The same states, or each as ``change`` makes it, kept where those are kept."""
    made: States = StatesOnDisk(states.folder) if isinstance(states, StatesOnDisk) else []
    made.extend(change(state) for state in states)
    return made


class StatesOnDisk(MutableSequence[torch.Tensor]):
    """Tensors of one shape and dtype in a file of ``folder`` that has no name: it is gone when the process is.

    An item is read when it is asked for, and given on the device that it came from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it lives as long as this does
        self._like = torch.empty(0)
        self._num = 0

    def __del__(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, window: Any) -> Any:
        if isinstance(window, slice):
            return [self[one] for one in range(*window.indices(self._num))]
        self._file.seek(self._place(window) * self._like.nbytes)
        bytes_ = torch.empty(self._like.nbytes, dtype=torch.uint8)
        self._file.readinto(bytes_.numpy().data)
        return bytes_.view(self._like.dtype).view(self._like.shape).to(self._like.device)

    def __setitem__(self, window: Any, state: Any) -> None:
        self._write(self._place(window), state)

    def insert(self, window: int, state: torch.Tensor) -> None:
        """Only at the end."""
        if window != self._num:
            raise IndexError("hidden states on disk grow at their end")
        if self._num == 0:
            self._like = torch.empty_like(state)
        self._write(window, state)
        self._num += 1

    def __delitem__(self, window: Any) -> None:
        raise TypeError("hidden states on disk are not deleted one by one")

    def _place(self, window: int) -> int:
        if not -self._num <= window < self._num:
            raise IndexError(window)
        return window % self._num

    def _write(self, place: int, state: torch.Tensor) -> None:
        if state.shape != self._like.shape or state.dtype != self._like.dtype:
            raise ValueError(f"a state of {state.shape} {state.dtype} among {self._like.shape} {self._like.dtype}")
        self._file.seek(place * self._like.nbytes)
        self._file.write(state.detach().contiguous().view(-1).cpu().view(torch.uint8).numpy().data)
