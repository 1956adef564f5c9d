"""A GGUF file that llama.cpp's converter laid out, as a model folder, with the map beside it. No torch.

The map (``engine.containers.llama_cpp.rows``) is a safetensors file with the config.json of the model, the dtype and
the shape of each of its tensors, and where their rows lie in the GGUF file.
"""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantcore.checkpoint.headers import read_safetensors_header
from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader
from quantcore.errors import ModelError
from quantcore.export.gguf.header import GgufHeader
from quantcore.sandbox.opening import open_file

ROW_MAP = "model.rows.safetensors"
PLACES = "places"
"""The tensor with the text of the map: for each tensor of the checkpoint, where its rows lie."""
MODEL = "model"
"""The tensor with config.json, and the dtype and the shape of each tensor of the checkpoint."""
ROWS = "rows/"
"""Prefix of the tensors that hold the order of rows: ``rows/model.layers.0...``."""


def has_model(path: Path) -> bool:
    """Return True if the map beside the GGUF file ``path`` holds what reading it back as a model needs."""
    map_file = path.with_name(ROW_MAP)
    return map_file.is_file() and MODEL in read_safetensors_header(map_file)


def read_laid_out(header: GgufHeader) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return (config.json, tensors by the checkpoint's names) of such a file; those with codes have GGUF's types.

    Floats have the dtypes of the GGUF file. Raises ModelError: ``invalid_gguf`` for a map that does not fit,
    ``unsupported_architecture`` for a matrix of which several tensors have parts.
    """
    map_file = header.path.with_name(ROW_MAP)
    beside = read_safetensors_header(map_file)
    try:
        model = json.loads(_read(map_file, beside[MODEL]))
        places = json.loads(_read(map_file, beside[PLACES]))
        config, tensors = dict(model["config"]), {}
        for name, (dtype, shape) in model["tensors"].items():
            if name in places:
                rows = _rows(map_file, beside.get(f"{ROWS}{name}"))
                tensors[name] = _placed(header, name, places[name], tuple(shape), rows)
            else:
                tensors[name] = replace(beside[name], dtype=dtype) if dtype in GGUF_BLOCKS else beside[name]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise ModelError(
            f"{map_file.name} does not fit {header.path.name}: {error!r}.",
            code="invalid_gguf",
            hint="Both were written together. Copy both, or quantize the model again.",
        ) from error
    return config, tensors


def _placed(
    header: GgufHeader, name: str, place: list[Any], shape: tuple[int, ...], rows: list[tuple[int, int]]
) -> TensorHeader:
    """Return the header of rows of a tensor in the GGUF file: from a first one on, or in the order of ``rows``."""
    is_in_order = isinstance(place[-1], int)
    if not is_in_order and len(place) > 1:
        raise ModelError(
            f"'{name}' lies in several tensors of {header.path.name}, which is not read as input.",
            code="unsupported_architecture",
            hint="llama.cpp runs the file. Its quality was measured when it was made: see report.json beside it. For"
            " another format, quantize the model that it was made from again.",
        )
    stored = header.tensors[place[0]]
    first = place[1] if is_in_order else min(row for _, row in rows)
    count = math.prod(shape[:-1]) if is_in_order else max(row for _, row in rows) + 1 - first
    order = () if is_in_order else tuple(row - first for _, row in rows)
    total = math.prod(stored.shape[:-1])
    row_bytes = (stored.end - stored.begin) // total
    if first < 0 or first + count > total or (order and len(order) != math.prod(shape[:-1])):
        raise ValueError(f"'{name}' has rows {first} to {first + count} of {total}")
    if math.prod(shape[-1:]) != stored.shape[-1]:
        raise ValueError(f"'{name}' has {shape[-1:]} columns")
    begin = stored.begin + first * row_bytes
    return replace(stored, shape=shape, begin=begin, end=begin + count * row_bytes, order=order)


def _rows(map_file: Path, header: TensorHeader | None) -> list[tuple[int, int]]:
    """Return pairs of the number of a tensor and of a row in it, from an int32 tensor [R, 2]."""
    if header is None:
        return []
    numbers = array("i", _read(map_file, header))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _read(map_file: Path, header: TensorHeader) -> bytes:
    with open_file(map_file) as file:
        file.seek(header.begin)
        return file.read(header.num_bytes)
