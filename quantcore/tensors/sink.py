"""Writes safetensors shards tensor by tensor, at offsets that are known in advance.

A plan knows the name, dtype and shape of every tensor, so the headers and all offsets are fixed at the start: tensors
may come in any order, nothing is held in memory, and the names of missing tensors are known at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from quantcore.checkpoint.layout import Stack, TensorHeader, TensorLayout
from quantcore.tensors.source import TORCH_DTYPES

MAX_SHARD_BYTES = 5_000_000_000
MAX_WRITE_BYTES = 1 << 30
"""Upper bound on the bytes of one write; macOS allows at most 2 GiB."""


class TensorSink(Protocol):
    """Writer of the tensors of one artifact.

    ``warnings`` are about the model, ``missing`` are the names not written yet.
    """

    missing: set[str]

    @property
    def warnings(self) -> tuple[str, ...]: ...
    def dtype_of(self, name: str) -> torch.dtype: ...
    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None: ...
    def finish(self) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class OpenFiles:
    """The files that a sink writes into, and the names of the tensors that are still ``missing``."""

    missing: set[str]
    _handles: list[int]

    def finish(self) -> None:
        """Sync the files to disk. Raises RuntimeError when a planned tensor was never written."""
        if self.missing:
            raise RuntimeError(f"{len(self.missing)} tensor(s) were never written, first '{min(self.missing)}'")
        self.sync()
        self.close()

    def sync(self) -> None:
        """Flush everything written to the disk."""
        for handle in self._handles:
            os.fsync(handle)

    def close(self) -> None:
        """Close the files (also after a failure)."""
        while self._handles:
            os.close(self._handles.pop())


class Sink(OpenFiles):
    """Writer of the weights of a checkpoint folder: ``write`` every tensor of ``layouts`` once, then ``finish``.

    ``tensors`` are those of a checkpoint with the same layouts; parts of a stack are written into it one by one.
    Several processes may write into one folder: one creates the files (``creates``), then the others open them.
    ``missing`` are the names that this process has not written; before ``finish``, set it to those that none has.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Mapping[str, TensorLayout],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        tensors: Mapping[str, TensorHeader] | None = None,
        *,
        creates: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._layouts = dict(layouts)
        self.missing = set(layouts)
        self._creates = creates
        self._transposed: dict[str, tuple[int, int]] = {}  # name -> first row, and number of rows, of what is stored
        self._places: dict[str, tuple[int, int]] = {}  # name -> (shard index, offset in its file)
        shards = _split(layouts, max_shard_bytes)
        self._files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            self._files = ["model.safetensors"]
        self._handles = [open_for_writing(folder / name, creates=creates) for name in self._files]
        for index, names in enumerate(shards):
            self._write_header(index, names)
        if creates and len(shards) > 1:
            self._write_index()
        for name, tensor in (tensors or {}).items():
            if tensor.stack is not None:
                self._see_in_stack(name, tensor, tensor.stack)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which ``write`` takes the tensor called ``name``."""
        return TORCH_DTYPES[self._layouts[name].dtype]

    warnings: tuple[str, ...] = ()

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Store ``tensor`` (any device). Its dtype and shape must be the planned ones; each name is written once.

        Returns None: a reader gets the same tensor back. Other sinks may return the tensor that a reader gets instead
        (see ``GgufSink``).
        """
        layout = self._layouts[name]
        if (
            TORCH_DTYPES[layout.dtype] != tensor.dtype
            or layout.shape != tuple(tensor.shape)
            or name not in self.missing
        ):
            raise RuntimeError(f"{name}: planned {layout}, got {tensor.dtype} {tuple(tensor.shape)}, or written twice")
        shard, offset = self._places[name]
        if name in self._transposed:
            write_transposed(self._handles[shard], tensor, offset, *self._transposed[name])
        else:
            write_at(self._handles[shard], tensor, offset)
        self.missing.discard(name)
        return None

    def _write_header(self, index: int, names: list[str]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            layout = self._layouts[name]
            begin, end = end, end + layout.num_bytes
            entries[name] = {"dtype": layout.dtype, "shape": list(layout.shape), "data_offsets": [begin, end]}
            self._places[name] = (index, begin)
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        if self._creates:
            _write_bytes(self._handles[index], len(header).to_bytes(8, "little") + header, 0)
            os.ftruncate(self._handles[index], 8 + len(header) + end)
        for name in names:
            self._places[name] = (index, self._places[name][1] + 8 + len(header))

    def _see_in_stack(self, name: str, tensor: TensorHeader, stack: Stack) -> None:
        self._layouts[name] = TensorLayout(tensor.dtype, tensor.shape)
        shard, offset = self._places[stack.name]
        self._places[name] = (shard, offset + tensor.begin - stack.begin)
        self.missing.discard(stack.name)
        self.missing.add(name)
        if tensor.transposed:
            first = 0 if tensor.rows is None else tensor.rows[0]
            self._transposed[name] = first, tensor.shape[0] * (tensor.end - tensor.begin) // tensor.num_bytes

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(layout.num_bytes for layout in self._layouts.values())},
            "weight_map": {name: self._files[self._places[name][0]] for name in sorted(self._places)},
        }
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def open_for_writing(path: Path, *, creates: bool) -> int:
    """Return a file handle for ``write_at``."""
    binary = getattr(os, "O_BINARY", 0)  # Windows would write every newline byte as two
    return os.open(path, os.O_RDWR | binary | (os.O_CREAT | os.O_TRUNC if creates else 0), 0o644)


def _write_bytes(handle: int, data: bytes | memoryview, offset: int) -> int:
    """Do the same as ``os.pwrite``, also on Windows, which lacks it."""
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, data, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.write(handle, data)


def write_at(handle: int, tensor: torch.Tensor, offset: int) -> None:
    """Write the bytes of ``tensor`` (any device) at ``offset`` of an open file."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(data):
        done += _write_bytes(handle, data[done : done + MAX_WRITE_BYTES], offset + done)


def write_transposed(handle: int, tensor: torch.Tensor, offset: int, first: int, num_rows: int) -> None:
    """Write a matrix [O, I] into the transpose [I, ``num_rows``] that begins at ``offset``, from row ``first`` on."""
    if len(tensor) == num_rows:
        write_at(handle, tensor.T, offset)
        return
    for column, values in enumerate(tensor.detach().cpu().T.contiguous()):
        write_at(handle, values, offset + (column * num_rows + first) * tensor.element_size())


def _split(layouts: Mapping[str, TensorLayout], max_shard_bytes: int) -> list[list[str]]:
    """Return the names of each shard, in plan order; a new one begins where the next tensor would overflow it.

    Within a shard wide dtypes come first, so that every tensor is aligned to its own element size.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, layout in layouts.items():
        if shards[-1] and size + layout.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += layout.num_bytes
    return [sorted(names, key=lambda name: (-layouts[name].element_bytes, name)) for names in shards]
