"""Runs llama.cpp's converter on a quantized checkpoint, and replaces the rows of its tensors by our blocks.

A program of its own, ``python -m quantcore.engine.containers.llama_cpp.driver JOB.json``, with the converter's folders
first on its path. The converter gets the dequantized tensors in float32, each when it is needed, under the checkpoint's
names. What it makes of them is compared row by row, byte for byte, with the rows that went in: whatever it renamed,
permuted, merged, split or stacked is found again, without a table for each architecture. Rows of a tensor that it
computed (a norm stored as 1 + w) are found nowhere, and the tensor stays as the converter made it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conversion
import gguf
import numpy as np
import torch
import transformers
from conversion.base import LazyTorchTensor, ModelBase, ModelType, get_model_architecture
from conversion.qwen import _LinearAttentionVReorderBase
from gguf.lazy import LazyChunkedTensor, LazyNumpyTensor  # type: ignore[attr-defined]  # newer than the package
from gguf.quants import dequantize

from quantcore.checkpoint.headers import read_json, read_tensor_headers
from quantcore.checkpoint.layout import GGUF_BLOCKS
from quantcore.engine.containers.llama_cpp.rows import Placed, RowMap
from quantcore.export.gguf.laid_out import ROW_MAP
from quantcore.tensors.source import Source

ALIGNMENT = 32  # of every tensor, GGUF's default
CHECKED_ROWS = 4096  # at a time
F32 = gguf.GGMLQuantizationType.F32
_quantize = gguf.quants.quantize


def refuse_foreign_code() -> None:
    """Keep the converter, which asks for it, from running Python code that comes with a model."""
    for kind in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoProcessor):
        load = kind.from_pretrained

        def without_code(*arguments: Any, load: Any = load, **options: Any) -> Any:
            return load(*arguments, **options | {"trust_remote_code": False, "local_files_only": True})

        setattr(kind, "from_pretrained", without_code)  # noqa: B010


@dataclass(frozen=True)
class Part:
    """A tensor of ours whose rows may have become rows of the converter's.

    ``keys`` tell its rows apart by their values. ``codes`` are the bytes of each row, None for a tensor of floats.
    """

    name: str
    kind: str
    keys: list[bytes]
    codes: np.ndarray[Any, Any] | None


def _rows(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the rows along the last axis; a vector is one row."""
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)


def _keys(rows: np.ndarray[Any, Any]) -> list[bytes]:
    """Return what tells rows apart. Two that were confused would be found when the codes are read back."""
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in np.ascontiguousarray(rows)]


class Checkpoint:
    """The staged tensors as the float checkpoint's, each read and dequantized when the converter asks for it.

    ``parts`` are those of the tensors that were read, by the tensor's name.
    """

    def __init__(self, folder: Path, stacks: dict[str, Any]) -> None:
        self.source = Source(folder, read_tensor_headers(folder) if folder.is_dir() else {})
        self._stacks = stacks
        self.parts: dict[str, list[Part]] = {}

    def lazily(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` of the float checkpoint, not read yet."""
        shape = tuple(self._stacks[name]["shape"])
        meta = LazyTorchTensor.meta_with_dtype_and_shape(torch.float32, shape)
        tensor: torch.Tensor = LazyTorchTensor(meta=meta, args=(name,), func=self.read)
        return tensor

    def read(self, name: str) -> torch.Tensor:
        stack = self._stacks[name]
        parts = self.parts[name] = []
        whole = torch.empty(math.prod(stack["shape"]) if stack["stacked"] else 0, dtype=torch.float32)
        for part_name, place in stack["parts"].items():
            part, values = self._part(part_name)
            parts.append(part)
            if not stack["stacked"]:
                return torch.from_numpy(values).view(stack["shape"])
            _put(whole, torch.from_numpy(values), **place)
        return whole.view(stack["shape"])

    def forget(self, names: Iterable[str]) -> None:
        """Free the parts of tensors."""
        for name in names:
            self.parts.pop(name, None)

    def _part(self, name: str) -> tuple[Part, np.ndarray[Any, Any]]:
        """Return a part, and the float32 values that it means."""
        stored, kind = self.source.read(name), self.source.tensors[name].dtype
        if kind not in GGUF_BLOCKS:
            values = stored.float().numpy()
            return Part(name, kind, _keys(_rows(values)), None), values
        codes = stored.numpy().reshape(-1, stored.shape[-1])
        values = dequantize(codes, gguf.GGMLQuantizationType[kind])
        return Part(name, kind, _keys(_rows(values)), codes), values


def _put(
    whole: torch.Tensor, matrix_OI: torch.Tensor, begin: int, num_rows: int, first: int, *, transposed: bool
) -> None:
    """Put a matrix into the flat tensor ``whole``, or its transpose into one [I, ``num_rows``] there."""
    if not transposed:
        whole[begin : begin + matrix_OI.numel()] = matrix_OI.flatten()
        return
    columns = matrix_OI.shape[1]
    target = whole[begin : begin + columns * num_rows].view(columns, num_rows)
    target[:, first : first + len(matrix_OI)] = matrix_OI.T


@dataclass
class Planned:
    """A tensor as the converter wants it: its values when they are asked for, and the type that it would give it."""

    name: str
    data: Any
    kind: gguf.GGMLQuantizationType
    sources: set[str]
    """The checkpoint's tensors that it is made from."""


def _sources(data: Any, read: Any) -> set[str]:
    """Return the names that ``read`` will be called with to compute lazy ``data``."""
    if isinstance(data, list | tuple):
        return set().union(*(_sources(each, read) for each in data))
    if not isinstance(data, gguf.LazyBase):
        return set()
    return set(data._args) if data._func == read else _sources(list(data._args), read)


def convert(job: dict[str, Any]) -> dict[str, Any]:
    """Write the GGUF file of the job and the map of its rows; with no ``out``, only see if the converter can.

    Returns ``left_out``, the checkpoint's tensors that the converter does not take, and ``tensors``, those of the file:
    the shape of each, and the checkpoint's tensors that it is made from. Of a file also ``computed``, its tensors that
    hold other values than the checkpoint, and ``widened``, quantized weights that llama.cpp wants in floats. A job with
    ``names_only`` needs no tokenizer; it returns some ``fields`` of the metadata as well.
    """
    checkpoint = Checkpoint(Path(job["staged"]), job["stacks"])
    model, taken = _model(job, checkpoint)
    planned = _planned(model, checkpoint)
    shapes = {each.name: tuple(int(size) for size in each.data.shape) for each in planned}
    tensors = {each.name: {"shape": shapes[each.name], "sources": sorted(each.sources)} for each in planned}
    result: dict[str, Any] = {"left_out": sorted(set(job["stacks"]) - taken), "tensors": tensors}
    if job.get("names_only"):
        return result | {"fields": _fields(model)}
    if job["out"] is None:
        _metadata(model, planned, shapes)
        return result
    return result | _write(model, planned, shapes, checkpoint, job)


def _model(job: dict[str, Any], checkpoint: Checkpoint) -> tuple[Any, set[str]]:
    """Return the converter's model of the job's folder, and the names of the tensors that it takes."""
    taken: set[str] = set()

    def index_tensors(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Any]:
        found = {}
        for name in job["stacks"]:
            item = self.filter_tensors((name, lambda name=name: checkpoint.lazily(name)))
            if item is not None:
                found[item[0]] = item[1]
                taken.add(name)
        return found

    ModelBase.index_tensors = index_tensors
    folder = Path(job["model"])
    hparams = ModelBase.load_hparams(folder, False)
    architecture = get_model_architecture(hparams, ModelType.TEXT)
    kind = conversion.get_model_class(architecture)
    if kind.supports_mtp_export and not any(part in name for name in job["stacks"] for part in ("mtp", "nextn")):
        kind.no_mtp = True  # the checkpoint has no draft layers, whatever the default of its class says
    file_type = gguf.LlamaFileType.MOSTLY_BF16  # then float32 is what llama.cpp needs, not what the model has
    return kind(folder, file_type, folder / "unused.gguf", hparams=hparams, model_name=job["name"]), taken


def _planned(model: Any, checkpoint: Checkpoint) -> list[Planned]:
    """Return every tensor that the converter would write, in its order, none of them read."""
    planned: list[Planned] = []
    gguf.quants.quantize = lambda data, qtype: data
    LazyChunkedTensor.quantize = lambda self, qtype: self

    def add_tensor(name: str, data: Any, raw_shape: Any = None, raw_dtype: Any = None, **_: Any) -> None:
        if raw_dtype is None and np.dtype(data.dtype).kind != "f":
            raise NotImplementedError(f"{name} is a tensor of {data.dtype}, which is not supported here")
        planned.append(Planned(name, data, F32 if raw_dtype is None else raw_dtype, _sources(data, checkpoint.read)))

    model.gguf_writer.add_tensor = add_tensor
    model.prepare_tensors()
    return planned


def _fields(model: Any) -> dict[str, Any]:
    """Return the metadata that the choice of types asks for; they need no tokenizer."""
    model.set_gguf_parameters()
    fields = model.gguf_writer.kv_data[0]
    names = ("block_count", "attention.head_count", "attention.head_count_kv", "expert_count")
    architecture = model.gguf_writer.arch
    found = {name: fields.get(f"{architecture}.{name}") for name in names}
    values = {name: None if each is None else each.value for name, each in found.items()}
    return {"architecture": architecture, "moved_heads": _moved_heads(model)} | values


def _moved_heads(model: Any) -> list[int] | None:
    """Return the numbers [keys, values per key] of heads whose columns change places in the projection after them.

    None if the converter leaves all columns of the model where they are.
    """
    if not isinstance(model, _LinearAttentionVReorderBase):
        return None
    num_keys, num_values = (int(model.hparams.get(f"linear_num_{name}_heads", 0)) for name in ("key", "value"))
    return [num_keys, num_values // num_keys] if num_keys and num_values > num_keys else None


def _metadata(model: Any, planned: Sequence[Planned], shapes: dict[str, tuple[int, ...]]) -> None:
    """Let the converter set the metadata and the tokenizer; it counts the parameters of the tensors that it knows."""
    writer = model.gguf_writer
    for each in planned:
        dtype = np.dtype("float32")
        writer.add_tensor_info(each.name, shapes[each.name], dtype, math.prod(shapes[each.name]) * 4)
    model.prepare_metadata(vocab_only=False)


def _write(
    model: Any,
    planned: Sequence[Planned],
    shapes: dict[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    job: dict[str, Any],
) -> dict[str, Any]:
    _metadata(model, planned, shapes)
    writer, out = model.gguf_writer, Path(job["out"])
    writer.kv_data[0]["general.file_type"] = gguf.GGUFValue(job["file_type_number"], gguf.GGUFValueType.UINT32)
    start = _header_bytes(writer, out)
    laid_out = LayOut(checkpoint, gguf.GGMLQuantizationType[job["floats"]])
    rows = {}
    with out.open("r+b") as file:
        file.truncate(start)
        file.seek(start)
        last_use = {source: number for number, each in enumerate(planned) for source in each.sources}
        for number, each in enumerate(planned):
            kind, data = laid_out.stored(each)
            checkpoint.forget(source for source in [*checkpoint.parts] if last_use.get(source, number) == number)
            file.write(np.ascontiguousarray(data).data)
            file.write(b"\0" * (-data.nbytes % ALIGNMENT))
            rows[each.name] = (kind, data.nbytes)
            del data
        file.flush()
        _finish_header(writer, rows, out)
        os.fsync(file.fileno())
    parts = [part for stack in job["stacks"].values() for part in stack["parts"]]
    model_config = read_json(Path(job["model"], "config.json"), "no_config")
    widened = laid_out.placed.save(out.with_name(ROW_MAP), parts, checkpoint.source, model_config)
    return {"computed": laid_out.computed, "widened": widened}


def _values(planned: Planned) -> np.ndarray[Any, Any]:
    data = planned.data
    if isinstance(data, LazyChunkedTensor):
        return np.concatenate([np.asarray(load()).reshape(-1) for load in data._chunks]).reshape(data.shape)
    values: np.ndarray[Any, Any] = LazyNumpyTensor.to_eager(data)
    return values


class LayOut:
    """Decides what is stored of each tensor of the converter, and notes where the rows of ours went.

    ``floats`` is the type of matrices that hold neither codes nor rows of ours; ``computed`` are their names.
    """

    def __init__(self, checkpoint: Checkpoint, floats: gguf.GGMLQuantizationType) -> None:
        self._checkpoint = checkpoint
        self._floats = floats
        self.placed = RowMap()
        self.computed: list[str] = []

    def stored(self, planned: Planned) -> tuple[gguf.GGMLQuantizationType, np.ndarray[Any, Any]]:
        """Return the type of a tensor, and what is written of it."""
        held = self._checkpoint.parts
        before = set(held)
        values = np.ascontiguousarray(_values(planned), dtype=np.float32)
        planned.data = None  # the converter's own copies go with it
        sources = planned.sources | (held.keys() - before)
        parts = [part for source in sources for part in held[source]]
        rows = _rows(values)
        keys = _keys(rows)
        origin = {key: (part, row) for part in parts for row, key in enumerate(part.keys)}
        wants_floats = planned.kind is F32
        if not all(key in origin for key in keys):
            self.computed.append(planned.name)
            return _plain(values, F32 if wants_floats else self._floats)
        kinds = {origin[key][0].kind for key in keys}
        kind = kinds.pop()
        if kinds or (kind in GGUF_BLOCKS and wants_floats):
            return _plain(values, F32)
        self._place(planned.name, keys, parts)
        if kind not in GGUF_BLOCKS:
            return _plain(values, F32 if wants_floats else gguf.GGMLQuantizationType[kind])
        found = gguf.GGMLQuantizationType[kind]
        width, num_bytes = GGUF_BLOCKS[kind]
        codes = np.empty((len(keys), rows.shape[1] // width * num_bytes), np.uint8)
        for number, key in enumerate(keys):
            part, row = origin[key]
            assert part.codes is not None
            codes[number] = part.codes[row]
        for start in range(0, len(keys), CHECKED_ROWS):
            some = slice(start, start + CHECKED_ROWS)
            if not np.array_equal(dequantize(codes[some], found), rows[some], equal_nan=True):
                raise RuntimeError(f"{planned.name}: the rows that were put in mean other values than the converter's")
        return found, codes

    def _place(self, name: str, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        file_rows: dict[bytes, int] = {}
        for number, key in enumerate(keys):
            file_rows.setdefault(key, number)
        for part in parts:
            self.placed.add(part.name, Placed(name, [file_rows.get(key, -1) for key in part.keys]))


def _plain(
    values: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> tuple[gguf.GGMLQuantizationType, np.ndarray[Any, Any]]:
    try:
        return kind, _quantize(values, kind)
    except gguf.QuantError:
        return gguf.GGMLQuantizationType.F16, _quantize(values, gguf.GGMLQuantizationType.F16)


def _header_bytes(writer: Any, out: Path) -> int:
    """Write the header with the tensors as they are known so far; return the place of the first tensor's data."""
    writer.write_header_to_file(path=out)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    size = out.stat().st_size
    return size + -size % ALIGNMENT


def _finish_header(writer: Any, rows: dict[str, tuple[gguf.GGMLQuantizationType, int]], out: Path) -> None:
    """Write the types and sizes of the tensors into the header, which keeps its length."""
    header = out.with_suffix(".header")
    for name, (kind, num_bytes) in rows.items():
        info = writer.tensors[0][name]
        info.dtype, info.nbytes = kind, num_bytes
    writer.fout, writer.state = None, gguf.WriterState.NO_FILE
    _header_bytes(writer, header)
    with out.open("r+b") as file:
        file.write(header.read_bytes())
    header.unlink()


def main(arguments: Sequence[str]) -> int:
    """Run the job in the given file, and write its result beside it."""
    job_file = Path(arguments[0])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    refuse_foreign_code()
    try:
        with torch.inference_mode():
            result = convert(job)
    except (Exception, SystemExit) as error:  # the converter raises anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        result = {"error": f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"}
    job_file.with_suffix(".result").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
