"""A GGUF file as a model folder: its config.json and the tensors of its checkpoint. No weights, no torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.errors import ModelError
from quantcore.export.gguf.gguf_config import MODEL_TYPES, model_config
from quantcore.export.gguf.header import GgufHeader, read_gguf_header
from quantcore.export.gguf.laid_out import has_model, read_laid_out
from quantcore.export.gguf.tensor_names import Places, stored_part

COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_IN_BLOCK = re.compile(r"\.\d+\.")  # of a tensor's name
FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return (config.json, tensors by the checkpoint's names) of the file; those in blocks have GGUF's types as dtypes.

    A model with codes in its embedding alone is one of floats. Norms and biases stay float32, as in the file. The
    model's dtype is that of most matrices without blocks, bfloat16 if there are none. Raises ModelError that names the
    unknown part.
    """
    header = read_gguf_header(path)
    is_ours = header.fields.get("general.architecture") in MODEL_TYPES
    config, tensors = read_laid_out(header) if not is_ours and has_model(path) else _by_our_names(header)
    main = _main_dtype(tensors)
    config["dtype"] = FLOAT_DTYPES[main]
    has_codes = any(tensor.dtype in GGUF_BLOCKS and _IN_BLOCK.search(name) for name, tensor in tensors.items())
    if not has_codes:
        tensors = {name: _as_floats(tensor, main) for name, tensor in tensors.items()}
    return config, tensors


def _by_our_names(header: GgufHeader) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return (config.json, tensors) of a file whose names and metadata are those of ``tensor_names``."""
    config = model_config(header)
    places, tensors = Places(config), {}
    num_experts = ModelConfig(config).num_experts or 0
    for stored, tensor in header.tensors.items():
        names = places.names(stored, num_experts)
        stack = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if stored in COMPUTED:
            continue
        if not names or stack != len(names):
            raise ModelError(
                f"'{stored}' in {header.path.name} does not belong to a model of type '{config['model_type']}'.",
                code="unsupported_architecture",
                hint="Provide the model as a folder with config.json and *.safetensors.",
            )
        for name in names:
            place = places.find(name)
            assert place is not None and place.name == stored, name
            tensors[name] = stored_part(tensor, place)
    return config, tensors


def _as_floats(tensor: TensorHeader, dtype: str) -> TensorHeader:
    """Return the header of a tensor in blocks as that of the floats that are read from it."""
    if tensor.dtype not in GGUF_BLOCKS:
        return tensor
    width, num_bytes = GGUF_BLOCKS[tensor.dtype]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // num_bytes * width)
    return replace(tensor, dtype=dtype, shape=shape, blocks=tensor.dtype)


def _main_dtype(tensors: dict[str, TensorHeader]) -> str:
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():  # routers are float32 in any file
        if len(tensor.shape) > 1 and tensor.dtype in FLOAT_DTYPES and not name.endswith(".gate.weight"):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="BF16")
