"""Reads the headers of the tensors of an ONNX language model, without torch.

``model.onnx`` is the graph; ``model.onnx.data`` holds all tensors, because the graph's format is limited to 2 GB.
Tensors have the names of the checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantcore.checkpoint.layout import DTYPE_BYTES, TensorHeader
from quantcore.errors import ModelError
from quantcore.sandbox.opening import open_file

FILE_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"
QUANT_METHOD = "onnx"
MAX_GRAPH_BYTES = 2 << 30  # limit of the graph's format
PARTS = (
    "weight_codes", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point", "output_scale",
    "output_zero_point",
)  # fmt: skip
"""Last components of the names of a quantized layer's tensors."""

DTYPES = {"F32": 1, "U8": 2, "I8": 3, "I32": 6, "I64": 7, "BOOL": 9, "F16": 10, "F64": 11, "BF16": 16, "F8_E4M3": 17,
          "F8_E5M2": 19}  # fmt: skip
"""ONNX's numbers for element types, by dtypes in safetensors' spelling."""

_COMPUTED = (".rotary_emb.inv_freq", ".attention.masked_bias")  # stored in old checkpoints; the model computes them


def is_computed(name: str) -> bool:
    """Return True for a tensor that the model computes itself, so that the graph does not need it."""
    return name.endswith(_COMPUTED)


def is_ours(model_config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of an ONNX model in our layout, with the names of the checkpoint."""
    quantization_config = model_config.get("quantization_config")
    return isinstance(quantization_config, dict) and quantization_config.get("quant_method") == QUANT_METHOD


def read_onnx_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the headers, by name, of the tensors that the graph in ``folder`` stores in its data file.

    Raises ModelError for a file that cannot be read, and for a tensor that is elsewhere or not wholly in its file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    dtypes = {number: dtype for dtype, number in DTYPES.items()}
    corrupt = {"code": "invalid_onnx", "hint": "The files are damaged or do not match."}
    try:
        with open_file(folder / FILE_NAME, max_bytes=MAX_GRAPH_BYTES) as file:
            graph = onnx.load_model_from_string(file.read()).graph
        with open_file(folder / DATA_NAME) as file:
            size = os.fstat(file.fileno()).st_size
    except (OSError, DecodeError) as error:
        raise ModelError(f"{FILE_NAME} cannot be read: {error}.", **corrupt) from error  # type: ignore[arg-type]
    headers = {}
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue  # a constant of the graph
        place = {entry.key: entry.value for entry in tensor.external_data}
        dtype, shape = dtypes.get(tensor.data_type, ""), tuple(tensor.dims)
        begin, length = int(place.get("offset", 0)), int(place.get("length", -1))
        fits = dtype in DTYPE_BYTES and length == math.prod(shape) * DTYPE_BYTES[dtype] and begin + length <= size
        if place.get("location") != DATA_NAME or begin < 0 or not fits:
            raise ModelError(f"'{tensor.name}' of {FILE_NAME} does not fit {DATA_NAME}.", **corrupt)  # type: ignore[arg-type]
        headers[tensor.name] = TensorHeader(dtype, shape, DATA_NAME, begin, begin + length)
    return headers
