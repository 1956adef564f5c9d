"""Where the rows of a checkpoint's tensors lie in a GGUF file that llama.cpp's converter laid out.

The map is a safetensors file beside the GGUF file. It has the places of all tensors as JSON, the numbers of rows that
are not in order, the tensors that the file has in another form, and config.json with the dtypes and shapes of all
tensors. llama.cpp does not need it; reading a result does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantcore.checkpoint.headers import read_safetensors_header
from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader, TensorLayout
from quantcore.export.gguf.laid_out import MODEL, PLACES, ROW_MAP, ROWS
from quantcore.tensors.source import TORCH_DTYPES, Rows, Source, rows_of


@dataclass(frozen=True)
class Placed:
    """Rows of a part that lie in the file's tensor ``name``: the row there of each of its rows, -1 if it is not there.

    A vector is one row.
    """

    name: str
    rows: list[int]


class RowMap:
    """Collects the places of all parts, and writes them."""

    def __init__(self) -> None:
        self._placed: dict[str, list[Placed]] = {}

    def add(self, part: str, placed: Placed) -> None:
        """Note where rows of ``part`` lie."""
        if any(row >= 0 for row in placed.rows):
            self._placed.setdefault(part, []).append(placed)

    def save(self, file: Path, parts: Iterable[str], source: Source, model_config: Mapping[str, Any]) -> list[str]:
        """Write the map of ``parts``, with those of ``source`` that the GGUF file lacks, and the model's config.json.

        Returns the names of these that hold codes.
        """
        places: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        widened, model = [], {"config": dict(model_config), "tensors": {}}
        for part in parts:
            model["tensors"][part] = source.tensors[part].dtype, source.tensors[part].shape
            pairs = _pairs(self._placed.get(part, ()))
            if pairs is None:
                tensors[part] = source.read(part)
                widened += [part] if source.tensors[part].dtype in GGUF_BLOCKS else []
            elif len(names := sorted({name for name, _ in pairs})) == 1 and _in_order(pairs):
                places[part] = [names[0], pairs[0][1]]
            else:
                places[part] = names
                tensors[f"{ROWS}{part}"] = torch.tensor([(names.index(name), row) for name, row in pairs]).int()
        for name, value in ((PLACES, places), (MODEL, model)):
            tensors[name] = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        save_file(tensors, file)
        return widened


def _pairs(placed: Iterable[Placed]) -> list[tuple[str, int]] | None:
    """Return the tensor and the row there of each row of a part; None if one of them lies nowhere."""
    found: list[tuple[str, int] | None] = []
    for each in placed:
        found = found or [None] * len(each.rows)
        found = [pair or ((each.name, row) if row >= 0 else None) for pair, row in zip(found, each.rows, strict=True)]
    pairs = [pair for pair in found if pair is not None]
    return pairs if pairs and len(pairs) == len(found) else None


def _in_order(pairs: list[tuple[str, int]]) -> bool:
    first = pairs[0][1]
    return all(row == first + number for number, (_, row) in enumerate(pairs))


class MappedSource:
    """Reads the tensors of such a GGUF file in ``folder`` by the names and in the layouts of the checkpoint.

    ``stored`` are the headers of the GGUF file's tensors.
    """

    def __init__(
        self, folder: Path, gguf_file: Path, stored: Mapping[str, TensorHeader], layouts: Mapping[str, TensorLayout]
    ) -> None:
        self._folder = folder
        self._stored = stored
        beside = read_safetensors_header(folder / ROW_MAP)
        self._beside = Source(folder, beside)
        self._places = json.loads(self._beside.read(PLACES).numpy().tobytes())
        self.tensors = {
            name: TensorHeader(layout.dtype, layout.shape, gguf_file.name, 0, layout.num_bytes)
            for name, layout in layouts.items()
            if name in self._places or name in beside
        }

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called ``name`` on the CPU: codes as bytes, others in the checkpoint's dtype."""
        header = self.tensors[name]
        if name not in self._places:
            return self._beside.read(name)
        if isinstance(self._places[name][-1], int):
            rows = self._matrix(*self._places[name], num_rows=math.prod(header.shape[:-1]))
        else:
            matrices = [self._matrix(tensor) for tensor in self._places[name]]
            rows = torch.stack([matrices[number][row] for number, row in self._beside.read(f"{ROWS}{name}").tolist()])
        return rows.to(TORCH_DTYPES[header.dtype]).reshape(header.shape)

    def rows(self, name: str) -> Rows:
        """Return a function that reads rows of the tensor called ``name``, which is read whole, once."""
        return rows_of(self.read(name))

    def _matrix(self, tensor: str, first: int = 0, *, num_rows: int | None = None) -> torch.Tensor:
        """Return rows of a tensor of the GGUF file from ``first`` on, by default all; a vector is one row.

        Only their bytes are read: of a stack those of one expert.
        """
        header = self._stored[tensor]
        total = math.prod(header.shape[:-1])
        row_bytes, count = (header.end - header.begin) // total, total if num_rows is None else num_rows
        begin = header.begin + first * row_bytes
        part = replace(header, shape=(count, header.shape[-1]), begin=begin, end=begin + count * row_bytes)
        return Source(self._folder, {tensor: part}).read(tensor)
