"""Reads tensors of a safetensors checkpoint or a GGUF file one at a time, by byte range."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader
from quantcore.errors import ModelError
from quantcore.sandbox.opening import open_file

TORCH_DTYPES = {
    **dict.fromkeys(GGUF_BLOCKS, torch.uint8),  # before U8, the name of uint8 outside GGUF files
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U32": torch.uint32,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


Rows = Callable[[range], torch.Tensor]
"""Function that returns some rows of a matrix."""


class TensorSource(Protocol):
    """Reads the tensors of a checkpoint or an artifact; ``tensors`` are their headers."""

    @property
    def tensors(self) -> Mapping[str, TensorHeader]: ...
    def __contains__(self, name: str) -> bool: ...
    def read(self, name: str) -> torch.Tensor: ...
    def rows(self, name: str) -> Rows: ...


class Source:
    """Reads exactly the requested bytes into fresh memory: nothing is mapped or kept."""

    def __init__(self, folder: Path, tensors: dict[str, TensorHeader]) -> None:
        self._folder = folder
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` on the CPU, in its stored dtype. Raises ModelError if it is not complete."""
        if name not in self.tensors:
            raise ModelError(
                f"The checkpoint has no tensor '{name}'.",
                code="missing_tensors",
                hint="Its names do not match the architecture in config.json, or a shard is missing.",
            )
        header = self.tensors[name]
        data = self._bytes(name, 0, header.end - header.begin)
        tensor = data.view(TORCH_DTYPES[header.dtype]) if header.blocks is None else _floats(data, header)
        if header.transposed:
            whole = tensor.view(header.shape[1], -1).T
            return (whole if header.rows is None else whole[slice(*header.rows)]).contiguous()
        if header.order:
            tensor = tensor.view(-1, header.shape[-1])[torch.tensor(header.order)]
        tensor = tensor.view(header.shape)
        if header.num_heads:
            tensor = torch.empty_like(tensor).index_copy_(0, interleaved(len(tensor), header.num_heads), tensor)
        return tensor - header.offset if header.offset else tensor

    def read_rows(self, name: str, rows: range) -> torch.Tensor:
        """Return some rows of a tensor. If it is stored row by row, only their bytes are read."""
        if not self._is_stored_by_row(name):
            return self.read(name)[rows.start : rows.stop]
        header = self.tensors[name]
        row_bytes = header.num_bytes // header.shape[0]
        tensor = self._bytes(name, rows.start * row_bytes, len(rows) * row_bytes).view(TORCH_DTYPES[header.dtype])
        return tensor.view(len(rows), *header.shape[1:])

    def rows(self, name: str) -> Rows:
        """Return a function that reads rows of a matrix. One that is not stored row by row is read whole, once."""
        return partial(self.read_rows, name) if self._is_stored_by_row(name) else rows_of(self.read(name))

    def _is_stored_by_row(self, name: str) -> bool:
        header = self.tensors.get(name)
        return (
            header is not None
            and not (header.transposed or header.num_heads or header.offset or header.blocks or header.order)
            and header.shape[0] > 0
        )

    def expect(self, names: Iterable[str]) -> None:
        """Tell the system that these tensors will be read soon, so that it fetches them from the disk meanwhile."""
        headers = [self.tensors[name] for name in names if name in self.tensors]
        for file_name in {header.file for header in headers} if hasattr(os, "posix_fadvise") else ():
            with open_file(self._folder / file_name) as file:
                for header in headers:
                    if header.file == file_name:
                        os.posix_fadvise(file.fileno(), header.begin, header.num_bytes, os.POSIX_FADV_WILLNEED)

    def _bytes(self, name: str, begin: int, count: int) -> torch.Tensor:
        header = self.tensors[name]
        buffer = torch.empty(count, dtype=torch.uint8)
        view = buffer.numpy().data
        with open_file(self._folder / header.file) as file:
            file.seek(header.begin + begin)
            done = 0
            while done < count:
                more = file.readinto(view[done:])
                if not more:
                    raise ModelError(f"{header.file} ends inside '{name}'.", code="corrupt_weights")
                done += more
        return buffer


def _floats(data: torch.Tensor, header: TensorHeader) -> torch.Tensor:
    """Return the values of blocks of a GGUF type, flat, by gguf's own dequantizer."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(data.numpy().reshape(header.shape[0], -1), GGMLQuantizationType[str(header.blocks)])
    return torch.from_numpy(values.copy()).flatten().to(TORCH_DTYPES[header.dtype])


def rows_of(matrix: torch.Tensor) -> Rows:
    """Return a function that returns rows of a matrix in memory."""
    return lambda rows: matrix[rows.start : rows.stop]


def interleaved(num_rows: int, num_heads: int) -> torch.Tensor:
    """Return the former index of each row of a matrix in which the rows of each head's two halves alternate."""
    return torch.arange(num_rows).view(num_heads, 2, -1).transpose(1, 2).flatten()
