"""Storage for the hidden states of many windows until their block runs.

A state that was read stays valid only until another one is written in its place.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any, Self

import torch

from quantcore.engine.model.parameter_names import FROM_FILE_TO_FILE
from quantcore.engine.runtime.devices import free_memory_bytes
from quantcore.errors import ModelError
from quantcore.plan.workload import KEPT_STATES_BYTES, STATES_SHARE


def states_kept(num_windows: int, num_bytes: int, device: torch.device, folder: Path) -> States:
    """Make an empty storage for the states of ``num_windows`` windows.

    It is on the disk of ``folder`` if ``num_bytes``, the size of all streams, is too much for the memory of ``device``.
    """
    is_small = num_bytes <= STATES_SHARE * free_memory_bytes(device)
    return StatesInMemory(num_windows) if is_small else StatesOnDisk(num_windows, folder)


def all_states_kept(num_states: int, num_bytes: int, folder: Path) -> States:
    """Make an empty storage for the states of all windows before every block, on the disk of ``folder`` if large."""
    is_small = num_bytes <= KEPT_STATES_BYTES
    return StatesInMemory(num_states) if is_small else StatesOnDisk(num_states, folder)


class States(MutableSequence[torch.Tensor]):
    """Tensors of one shape, at most ``capacity`` of them.

    Each has its own dtype: blocks that keep the residual stream in float32 (Mamba) return it for a bfloat16 embedding.
    All are stored in the widest dtype that any of them has had so far, which holds the others exactly.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num = 0
        self._like = torch.empty(0)  # of the stored dtype, on the meta device
        self._dtypes: list[torch.dtype] = []

    def copy(self) -> Self:
        """Copy the states into another storage of the same kind."""
        other = self.empty()
        other.extend(self)
        return other

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, window: Any) -> Any:
        if isinstance(window, slice):
            return [self[index] for index in range(*window.indices(self._num))]
        place = self._place(window)
        return self._read(place).to(self._dtypes[place])

    def __setitem__(self, window: Any, state: Any) -> None:
        place = self._place(window)
        self._make_fit(state)
        self._write(place, state.to(self._like.dtype))
        self._dtypes[place] = state.dtype

    def insert(self, window: int, state: torch.Tensor) -> None:
        """Append a state; ``window`` must be the next one."""
        if window != self._num or self._num == self.capacity:
            raise IndexError(f"{self.capacity} hidden states, which are put one behind another")
        if self._num == 0:
            self._like = torch.empty_like(state, device="meta")
            self._open(state)
        self._make_fit(state)
        self._write(window, state.to(self._like.dtype))
        self._num += 1
        self._dtypes.append(state.dtype)

    def __delitem__(self, window: Any) -> None:
        raise TypeError("hidden states are not deleted one by one")

    @abstractmethod
    def empty(self) -> Self:
        """Return another storage of the same kind and capacity, without states."""

    @abstractmethod
    def _open(self, like: torch.Tensor) -> None:
        """Prepare the storage; called before the first state is written, and again for a wider dtype."""

    @abstractmethod
    def _read(self, place: int) -> torch.Tensor: ...

    @abstractmethod
    def _write(self, place: int, state: torch.Tensor) -> None: ...

    def _place(self, window: int) -> int:
        if not -self._num <= window < self._num:
            raise IndexError(window)
        return window % self._num

    def _make_fit(self, state: torch.Tensor) -> None:
        """Widen the stored dtype if ``state`` needs it. Raises ModelError for another shape."""
        if state.shape != self._like.shape:
            raise ModelError(
                f"A decoder block returned hidden states of shape {list(state.shape)} instead of "
                f"{list(self._like.shape)}.",
                code="unsupported_architecture",
                hint=FROM_FILE_TO_FILE,
            )
        dtype = torch.promote_types(state.dtype, self._like.dtype)
        if dtype != self._like.dtype:
            before = [self._read(place).clone() for place in range(self._num)]
            self._like = self._like.to(dtype)
            self._open(state.to(dtype))
            for place, old in enumerate(before):
                self._write(place, old.to(dtype))


class StatesInMemory(States):
    """States in one tensor. Separate tensors that come and go would fragment the memory."""

    def empty(self) -> Self:
        return type(self)(self.capacity)

    def _open(self, like: torch.Tensor) -> None:
        self._all = like.new_empty(self.capacity, *like.shape)

    def _read(self, place: int) -> torch.Tensor:
        return self._all[place]

    def _write(self, place: int, state: torch.Tensor) -> None:
        self._all[place].copy_(state)


class StatesOnDisk(States):
    """States in a file of ``folder`` without a name, which disappears with the process.

    An item is read on access, and returned on the device of the first one.
    """

    def __init__(self, capacity: int, folder: Path) -> None:
        super().__init__(capacity)
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it lives as long as this does

    def __del__(self) -> None:
        self._file.close()

    def empty(self) -> Self:
        return type(self)(self.capacity, self._folder)

    def _open(self, like: torch.Tensor) -> None:
        self._device = like.device

    def _read(self, place: int) -> torch.Tensor:
        bytes_ = torch.empty(self._like.nbytes, dtype=torch.uint8)
        self._file.seek(place * self._like.nbytes)
        self._file.readinto(bytes_.numpy().data)
        return bytes_.view(self._like.dtype).view(self._like.shape).to(self._device)

    def _write(self, place: int, state: torch.Tensor) -> None:
        self._file.seek(place * self._like.nbytes)
        self._file.write(state.detach().contiguous().view(-1).cpu().view(torch.uint8).numpy().data)


Axes = tuple[int, int]
"""The axes of windows and of tokens in the hidden states that a block takes."""


def packed(state: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return hidden states of a block as [N, T, ...]."""
    return state if axes == (0, 1) else state.movedim(axes, (0, 1))


def unpacked(state: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return hidden states [N, T, ...] as a block takes them."""
    return state if axes == (0, 1) else state.movedim((0, 1), axes)
