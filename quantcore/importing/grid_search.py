"""Finds the grids on which the weights of a model lie: from the types in its files, else in a few rows of some layers.

A model that was dequantized looks like any float model. Its figures do not: a scheme on its grid loses nothing, and
every figure is relative to what the first quantization left. No torch.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from quantcore.checkpoint.layers import is_linear
from quantcore.checkpoint.layout import DTYPE_BYTES, GGUF_BLOCKS, TensorHeader
from quantcore.config.gguf_types import GGUF_TYPES
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QSchemeType, ScaleType
from quantcore.export import tensor_name
from quantcore.formats import IntFormat
from quantcore.formats.grid import MICROSCALING, Grid, GridShare, Scope, find_grid
from quantcore.importing.model import Model, QuantizedLayers
from quantcore.sandbox.opening import open_file

MAX_LAYERS = 32
"""Layers that are looked at: with that many a grid of one layer in ten is missed once in thirty times."""
MIN_COLUMNS, MAX_COLUMNS = 16, 1024
MIN_VALUES = 768
FLOATS = {"F32": "f", "F16": "e", "BF16": "H"}
SMALLEST_ERRORS = {"F16": 2.0**-25}
SCOPES: dict[QSchemeType, Scope] = {
    QSchemeType.per_tensor: "tensor",
    QSchemeType.per_channel: "row",
    QSchemeType.per_group: "group",
    QSchemeType.per_block: "block",
}


def with_grids(model: Model) -> Model:
    """Return the model with its ``headers.grids``, and a warning about them.

    Of weights that are not there, in an outline of a model on the Hub, nothing is said. Weights into which an
    adapter is merged lie on no grid.
    """
    changed = () if model.adapter is None else model.adapter.changes
    grids = _of_codes(model.quantized, changed) if model.quantized is not None else _of_samples(model, changed)
    if not grids:
        return model
    warning = (
        f"The weights already lie on a grid of few levels: {'; '.join(map(str, grids))}. A scheme with the same "
        "levels is lossless here. Quality is measured against this model, not the float model it was made from."
    )
    headers = replace(model.headers, grids=grids, warnings=(*model.headers.warnings, warning))
    return replace(model, headers=headers)


def _shares(found: Counter[Grid | None]) -> tuple[GridShare, ...]:
    total = sum(found.values())
    return tuple(GridShare(grid, count / total) for grid, count in found.most_common() if grid is not None)


def _of_codes(quantized: QuantizedLayers, changed: Collection[str]) -> tuple[GridShare, ...]:
    found: Counter[Grid | None] = Counter()
    for name, layer in quantized.layers.items():
        if name in changed:
            found[None] += math.prod(layer.shape)
            continue
        stored = quantized.files.tensors.get(tensor_name(layer.name, "weight"))
        if stored is not None and stored.dtype in GGUF_BLOCKS:
            size = GGUF_TYPES[stored.dtype].group_size
            grid: Grid | None = Grid(stored.dtype, _named_bits(stored.dtype), "group", size)
        else:
            grid = _grid_of_spec(layer)
        found[grid] += math.prod(layer.shape)
    return _shares(found)


def _named_bits(gguf_type: str) -> int:
    """Return the bits of a code in the type's name: 4 for IQ4_XS and MXFP4."""
    return int(next(filter(str.isdigit, gguf_type)))


def _grid_of_spec(layer: LayerPlan) -> Grid:
    spec = layer.weight
    fmt = spec.format
    scope, size = SCOPES[spec.qscheme], spec.group_size
    if spec.block_size is not None:
        size = spec.block_size[1]
    if size == -1:
        scope, size = "row", None
    name = spec.dtype.value
    if isinstance(fmt, IntFormat):
        name = "symmetric" if spec.symmetric else "asymmetric"
    elif spec.scale_type is ScaleType.e8m0:
        name = MICROSCALING.get(name, name)
    elif (name, size) == ("fp4", 16):
        name = "NVFP4"
    return Grid(name, fmt.bits, scope, size)


def _of_samples(model: Model, changed: Collection[str]) -> tuple[GridShare, ...]:
    tensors = model.headers.tensors
    names = sorted(name for name, tensor in tensors.items() if is_linear(name, tensor) and _is_readable(tensor))
    found: Counter[Grid | None] = Counter()
    for name in random.Random(0).sample(names, min(MAX_LAYERS, len(names))):
        if name in changed:
            found[None] += math.prod(tensors[name].shape)
            continue
        rows = _rows(model, tensors[name])
        if any(map(any, rows)):
            grid = find_grid(rows, smallest_error=SMALLEST_ERRORS.get(tensors[name].dtype, 0.0))
            found[grid] += math.prod(tensors[name].shape)
    return _shares(found)


def _is_readable(tensor: TensorHeader) -> bool:
    """Return True for a float weight that is stored row by row."""
    is_plain = tensor.dtype in FLOATS and not tensor.transposed
    return is_plain and tensor.shape[0] > 1 and tensor.shape[1] >= MIN_COLUMNS


def _rows(model: Model, tensor: TensorHeader) -> list[tuple[float, ...]]:
    """Read the beginnings of neighbouring rows in the middle of a weight, at least two, and of its last row."""
    num_rows, width = tensor.shape
    count = min(width, MAX_COLUMNS)
    first = num_rows // 2 & ~1
    wanted = range(first, min(num_rows, first + max(2, MIN_VALUES // width)))
    row_bytes = width * DTYPE_BYTES[tensor.dtype]
    rows = []
    with open_file(model.folder / tensor.file) as file:
        for row in dict.fromkeys((*wanted, num_rows - 1)):
            file.seek(tensor.begin + row * row_bytes)
            rows.append(_floats(file.read(count * DTYPE_BYTES[tensor.dtype]), tensor.dtype))
    return rows


def _floats(data: bytes, dtype: str) -> tuple[float, ...]:
    """Return the values of little-endian floats."""
    count = len(data) // DTYPE_BYTES[dtype]
    values = struct.unpack(f"<{count}{FLOATS[dtype]}", data[: count * DTYPE_BYTES[dtype]])
    if dtype == "BF16":  # the upper half of a float32
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(value << 16 for value in values)))
    return values
