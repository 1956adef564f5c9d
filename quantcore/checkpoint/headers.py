"""Reads config.json and the headers of a model folder's weight files: no weights, no torch.

The folder is not trusted: every name in the index must be a plain file inside it, headers are bounded before they are
parsed, and the byte ranges in a header are compared with the file's size. A safetensors header is 8 bytes of
little-endian length, then JSON ``{name: {dtype, shape, data_offsets}}``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.besides import (
    ADAPTER,
    check_strays,
    refuse_adapter,
    refuse_folder_of_models,
    weights_without_index,
)
from quantcore.checkpoint.config_checks import check_config
from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.layout import DTYPE_BYTES, TensorHeader
from quantcore.checkpoint.onnx_headers import is_ours, read_onnx_headers
from quantcore.checkpoint.side_files import SIDE_FILES, inner_files, side_files
from quantcore.errors import ModelError
from quantcore.formats.grid import GridShare
from quantcore.sandbox.opening import MAX_SIDE_FILE_BYTES, open_file

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 32 << 20  # a mixture of experts has tens of thousands of tensors, some 100 bytes each
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 8
MODEL_FILES = ("*.json", "*.safetensors", "*.gguf", "*.jinja", "*.model", "*.txt")
"""Patterns of the files that a model may need, including tokenizer and chat template."""
WEIGHTS = (".safetensors", ".gguf")
_IN_LIST = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True)
class ModelHeaders:
    """A model without its weights: ``config`` as in config.json, ``tensors`` by name.

    ``warnings`` are for the user, before the model is quantized. ``grids``: those on which the weights lie, where
    ``importing.grid_search`` has looked. ``stored_bytes``: the size of the tensors in the files if these are quantized;
    ``tensors`` are then those of the float model.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    warnings: tuple[str, ...] = ()
    grids: tuple[GridShare, ...] = ()
    stored_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """The dtype in which the model computes: see ``main_dtype``."""
        return main_dtype(self.tensors)


def main_dtype(tensors: Mapping[str, TensorHeader]) -> str:
    """Return the float dtype of most bytes in blocks, in which a model of these tensors computes.

    Embeddings and the head may be kept in float32, and be larger than all blocks. Masks and indices do not count.
    """
    in_blocks = {name: tensor for name, tensor in tensors.items() if _IN_LIST.search(name)}
    for counted in (in_blocks, tensors):
        sizes: dict[str, int] = {}
        for tensor in counted.values():
            if "F" in tensor.dtype:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
        if sizes:
            break
    return max(sizes, key=lambda dtype: sizes[dtype])


def scale_dtype(stored: str, computed: str) -> str:
    """Return the dtype in which scales of a layer are stored that lies in dtype ``stored`` and runs in ``computed``.

    It must hold what was computed: the scales of a bfloat16 layer in a float32 model are float32.
    """
    return stored if stored == "F32" else computed


def check_files(path: Path) -> None:
    """Open every file of the model once, so that a fault is reported before hours of work.

    ``path`` may also be a single file. Missing files are not reported here.

    Raises ModelError: ``model_not_readable`` for files that this process may not read, else as ``opening.open_file``.
    """
    refused = path
    try:
        if not path.exists():
            return
        is_folder = path.is_dir()
        names = [*side_files(path, (*SIDE_FILES, *MODEL_FILES)), *inner_files(path)] if is_folder else [path.name]
        for name in names:
            refused = path / name if is_folder else path
            limit = None if not is_folder or name.endswith(WEIGHTS) else MAX_SIDE_FILE_BYTES
            with suppress(FileNotFoundError):
                open_file(refused, root=path if is_folder else None, max_bytes=limit).close()
    except PermissionError as error:
        uid = os.geteuid() if hasattr(os, "geteuid") else ""
        raise ModelError(
            f"This process (user {uid}) may not read {refused}.",
            code="model_not_readable",
            hint=f"Give that user, or everybody, read access: chmod -R a+rX '{path}', as the files' owner.",
        ) from error


def read_local(model_dir: Path | str) -> ModelHeaders:
    """Read the headers of the float model in ``model_dir``. Raises ModelError that names the file at fault."""
    config, tensors = read_folder(Path(model_dir))
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"The model is already quantized (quant_method '{method}').",
            code="already_quantized",
            hint="Provide the float model it was made from.",
        )
    return ModelHeaders(config=config, tensors=unstack_experts(tensors))


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Read config.json and the headers of the tensors of a float or quantized model. Raises as ``read_local``."""
    if not folder.is_dir():
        raise ModelError(
            f"There is no model folder at {folder}.",
            code="model_not_found",
            hint="Provide a folder that contains config.json and *.safetensors.",
        )
    refuse_adapter({path.name for path in folder.glob(ADAPTER)})
    refuse_folder_of_models(folder)
    config = read_json(folder / "config.json", "no_config")
    if "model_type" not in config:
        raise ModelError(
            "config.json has no model_type.", code="unsupported_architecture", hint="Save the model with Transformers."
        )
    if is_ours(config):
        return config, read_onnx_headers(folder)
    tensors = read_tensor_headers(folder)
    check_config(config, tensors)
    return config, tensors


def read_tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the header of every tensor in the safetensors files of ``folder``, by name."""
    tensors: dict[str, TensorHeader] = {}
    for name in _weight_files(folder):
        of_file = read_safetensors_header(folder / name)
        twice = sorted(of_file.keys() & tensors.keys())
        if twice:
            raise ModelError(
                f"'{twice[0]}' is in two files, {tensors[twice[0]].file} and {name}.",
                code="corrupt_weights",
                hint="Keep only the files of one checkpoint in the folder, or add its model.safetensors.index.json.",
            )
        tensors.update(of_file)
        if len(tensors) > MAX_TENSORS:
            raise ModelError(f"The model has more than {MAX_TENSORS} tensors.", code="header_too_large")
    _check_index(folder, tensors)
    check_strays(folder, {tensor.file for tensor in tensors.values()})
    return tensors


def read_json(path: Path, missing_code: str, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object of bounded size. Raises ModelError for anything else."""
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                raise ModelError(f"{path.name} is larger than {max_bytes >> 20} MiB.", code="config_implausible")
            data = json.loads(file.read().decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(data, ensure_ascii=False).encode()  # fails for half a surrogate pair, which no file can hold
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.name} is missing from {path.parent}.", code=missing_code, hint="Provide the complete model folder."
        ) from error
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path.name} cannot be read as JSON: {error}.", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path.name} is not a JSON object.", code="invalid_json")
    return data


def read_safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """Read the header of every tensor in one safetensors file, and compare them with the file's size."""
    corrupt = {"code": "corrupt_weights", "hint": "The file is damaged or incomplete: download it again."}
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelError(f"{path.name} is shorter than its own header says.", **corrupt)  # type: ignore[arg-type]
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"The header of {path.name} is {length} bytes.", code="header_too_large")
            header = json.loads(file.read(length), object_pairs_hook=_unique_keys)
            if not isinstance(header, dict):
                raise ValueError("it is not a JSON object")
    except FileNotFoundError as error:
        raise ModelError(f"{path.name} is listed in the index but does not exist.", code="missing_shard") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"The header of {path.name} is not valid: {error}.", **corrupt) from error  # type: ignore[arg-type]
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelError(f"{path.name} lists {len(header)} tensors.", code="header_too_large")
    tensors = {name: _tensor_header(path, name, entry, size - 8 - length, 8 + length) for name, entry in header.items()}
    _check_seamless(path, tensors, 8 + length, size)
    return tensors


def _check_seamless(path: Path, tensors: dict[str, TensorHeader], begin: int, end: int) -> None:
    """Raise ModelError unless every byte of the file belongs to exactly one tensor, as the format demands."""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != begin:
            raise ModelError(
                f"Tensor '{name}' in {path.name} does not begin where the previous one ends.",
                code="corrupt_weights",
                hint="The file was not written by a safetensors library: save the model again.",
            )
        begin = tensor.end
    if begin != end:
        raise ModelError(f"{path.name} contains more than its tensors.", code="corrupt_weights")


def _tensor_header(path: Path, name: str, entry: dict[str, Any], data_bytes: int, data_start: int) -> TensorHeader:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        sound = whole and len(shape) <= MAX_DIMENSIONS and begin <= end <= data_bytes and end - begin == expected
    except (KeyError, TypeError, ValueError, OverflowError):
        sound = False
    if not sound:
        raise ModelError(
            f"Tensor '{name}' in {path.name} does not fit the file (or has an unknown dtype).",
            code="corrupt_weights",
            hint="The file is damaged or incomplete: download it again.",
        )
    return TensorHeader(dtype, shape, path.name, data_start + begin, data_start + end)


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files: those of the index if there is one, else all in the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index, "no_weights", max_bytes=MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError("The index has no weight_map of file names.", code="invalid_json")
        names = sorted(set(weight_map.values()))
    else:
        names = weights_without_index(sorted(path.name for path in folder.glob("*.safetensors")))
    for name in names:
        _check_name(name)
    if not names:
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
        if others:
            raise ModelError(
                f"The folder contains only pickled weights ({', '.join(others[:3])}), which can run code when loaded.",
                code="unsafe_weights_format",
                hint="Convert the model to safetensors first.",
            )
        raise ModelError(f"There are no *.safetensors files in {folder}.", code="no_weights")
    return names


def _check_name(name: str) -> None:
    """Raise ModelError unless ``name`` is a plain file name of a safetensors file."""
    if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise ModelError(f"The index names '{name}', which is not a plain file name.", code="unsafe_path")
    if not name.endswith(".safetensors"):
        raise ModelError(f"The index names '{name}', which is not a safetensors file.", code="unsafe_weights_format")


def _check_index(folder: Path, tensors: dict[str, TensorHeader]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index, "no_weights", max_bytes=MAX_INDEX_BYTES)["weight_map"]
        missing = sorted(name for name, file in weight_map.items() if name not in tensors or tensors[name].file != file)
        if missing:
            raise ModelError(
                f"{len(missing)} tensor(s) of the index are not in the file it names, first '{missing[0]}'.",
                code="missing_tensors",
            )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
