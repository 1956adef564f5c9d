"""A GGUF file (version 3), written tensor by tensor at offsets known before the first byte, and read back one by one.

Callers use the tensors' checkpoint names. The differences of the file are handled here: names, experts in stacks, the
order of rows of queries and keys, Gemma's norms. Rows of codes move like rows of floats: groups lie inside rows.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantcore.checkpoint.artifact import STAGED
from quantcore.checkpoint.folder import find_gguf, model_name
from quantcore.checkpoint.layout import GGUF_BLOCKS, TensorHeader, TensorLayout
from quantcore.engine.containers.llama_cpp.rows import MappedSource
from quantcore.engine.containers.llama_cpp.sink import ConvertedSink
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.model.skeleton import clean_config
from quantcore.export import FileContents
from quantcore.export.gguf.converted import converted_names
from quantcore.export.gguf.gguf_tokenizer import describe_tokenizer
from quantcore.export.gguf.header import read_gguf_header
from quantcore.export.gguf.metadata import (
    OF_THE_FILE,
    add_general,
    add_model,
    add_tokenizer,
    rope_tensors,
    warn_of_window,
)
from quantcore.export.gguf.splitting import is_split, split_gguf
from quantcore.export.gguf.tensor_names import FILE_NAME, Place, Places, has_own_layout, stored_part
from quantcore.tensors.sink import OpenFiles, TensorSink, open_for_writing, write_at
from quantcore.tensors.source import TORCH_DTYPES, Rows, Source, TensorSource, interleaved

ALIGNMENT = 32  # of every tensor, GGUF's default
EMBEDDING = "model.embed_tokens.weight"
_TYPES = re.compile(r"[-.]([IT]?Q\d\w*|(MX|NV)FP4\w*|BF16|F16|F32)$", re.IGNORECASE)
_MIXES_OF_ONE = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"}
"""Types whose names are not those of a mix -> the mix with most tensors of the type."""


def sink(folder: Path, contents: FileContents, *, creates: bool = True) -> TensorSink:
    """See ``ContainerFile``."""
    if has_own_layout(contents.model_config):
        return GgufSink(folder, contents, creates=creates)
    name = _model_name(contents.model_config, contents.model_dir)
    file, file_type = folder / _file_name(name, contents.mix), _file_type(contents.layouts, contents.mix)
    return ConvertedSink(file, contents, name=_without_types(name), file_type=file_type, creates=creates)


def source(
    folder: Path,
    layouts: Mapping[str, TensorLayout],
    model_config: Mapping[str, Any],
    floats: Mapping[str, TensorHeader],
) -> TensorSource:
    """See ``ContainerFile``."""
    if not has_own_layout(model_config):
        gguf_file = find_gguf(folder) or folder / FILE_NAME
        return MappedSource(folder, gguf_file, read_gguf_header(gguf_file).tensors, layouts)
    return GgufSource(folder, layouts, model_config, floats)


def places_of(model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> Mapping[str, tuple[Place, ...]]:
    """Return where each of the checkpoint's ``tensors`` lies in a GGUF file of the model.

    Raises ModelError, ConfigError for an architecture that llama.cpp does not know.
    """
    if not has_own_layout(model_config):
        return converted_names(model_config, tensors).places
    return {name: (place,) for name, place in _places(tensors, model_config).items()}


class GgufSink(OpenFiles):
    """The file of a GGUF artifact. ``write`` every tensor of the layouts once, then ``finish``, which may split it.

    ``warnings`` are about config.json and the tokenizer. A file with a named
    ``mix`` of types is called as on the Hub, ``NAME-Q4_K_M.gguf``; others are called model.gguf.
    """

    def __init__(self, folder: Path, contents: FileContents, *, creates: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layouts, model_config, model_dir = contents.layouts, contents.model_config, contents.model_dir
        self._layouts = dict(layouts)
        self.missing = set(layouts)
        self._places = _places(layouts, model_config)
        self._offsets: dict[str, int] = {}  # by the name in the file
        tokenizer = describe_tokenizer(load_tokenizer(model_dir), layouts[EMBEDDING].shape[0])
        config = clean_config(dict(model_config)).to_dict()
        self.warnings = tokenizer.warnings + warn_of_window(config)
        computed = rope_tensors(config)
        about, name = _general(model_dir), _model_name(model_config, model_dir)
        whole_file = _file_name(name, contents.mix)
        self._folder, self._max_bytes = folder, contents.max_bytes
        self._is_split = is_split((layout.num_bytes for layout in layouts.values()), contents.max_bytes)
        self._file = folder / STAGED / whole_file if self._is_split else folder / whole_file
        self._file.parent.mkdir(exist_ok=True)
        writer = _writer(_header_of(self._file), Places(model_config).architecture.name)
        add_model(
            writer, config, about.pop("general.name", None) or _without_types(name), _file_type(layouts, contents.mix)
        )
        add_general(writer, about)
        add_tokenizer(writer, tokenizer)
        stacks = Counter(place.name for place in self._places.values())
        shapes = {
            place.name: _stored(layouts[name], stacks[place.name] if place.index is not None else None)
            for name, place in self._places.items()
        }
        shapes |= {name: TensorLayout("F32", tuple(tensor.shape)) for name, tensor in computed.items()}
        self._handles = [self._write_header(writer, self._file, shapes, creates=creates)]
        for name, tensor in computed.items():
            write_at(self._handles[0], tensor, self._offsets[name])

    def finish(self) -> None:
        super().finish()
        if self._is_split:
            split_gguf(self._file, self._folder, self._max_bytes)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which ``write`` takes the tensor called ``name``."""
        return TORCH_DTYPES[self._layouts[name].dtype]

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Store ``tensor`` (any device), planned as any dtype that holds its values exactly; each name is written once.

        Returns the tensor that a reader will get back if it may differ: norms that GGUF stores as 1 + weight, a sum
        that is rounded to float32, as when the model computes with it. Returns None for all others.
        """
        if name not in self._layouts:
            return None  # llama.cpp computes this one itself
        layout, place, dtype = self._layouts[name], self._places[name], tensor.dtype
        if layout.shape != tuple(tensor.shape) or name not in self.missing:
            raise RuntimeError(f"{name}: planned {layout}, got {tensor.dtype} {tuple(tensor.shape)}, or written twice")
        kept = tensor.to(TORCH_DTYPES[layout.dtype])
        if place.offset:
            kept = kept + place.offset
        rows = interleaved(len(kept), place.num_heads) if place.num_heads else None
        offset = self._offsets[place.name] + (place.index or 0) * layout.num_bytes
        write_at(self._handles[0], kept if rows is None else kept[rows.to(kept.device)], offset)
        self.missing.discard(name)
        return (kept - place.offset).to(dtype) if place.offset else None

    def _write_header(self, writer: Any, file: Path, shapes: Mapping[str, TensorLayout], *, creates: bool) -> int:
        """Write everything before the data and reserve room for the data. Returns the open file."""
        import numpy
        from gguf import GGMLQuantizationType

        end = 0
        for name, layout in shapes.items():
            numpy_dtype = numpy.dtype("uint8" if layout.dtype in GGUF_BLOCKS else "float32")
            kind = GGMLQuantizationType[layout.dtype]
            writer.add_tensor_info(name, layout.shape, numpy_dtype, layout.num_bytes, raw_dtype=kind)
            self._offsets[name] = end
            end += layout.num_bytes + -layout.num_bytes % ALIGNMENT
        unfinished = _header_of(file)
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = bytearray(unfinished.read_bytes())
        unfinished.unlink()
        start = len(header) + -len(header) % ALIGNMENT
        self._offsets = {name: start + offset for name, offset in self._offsets.items()}
        handle = open_for_writing(file, creates=creates)
        write_at(handle, torch.frombuffer(header, dtype=torch.uint8), 0)
        os.ftruncate(handle, start + end)
        return handle


class GgufSource:
    """Reads the tensors of a GGUF file under the names of the checkpoint with this config.json.

    ``tensors`` are the headers of the file's tensors; one that the checkpoint does not have keeps its GGUF name.
    ``floats`` are the checkpoint's headers: tensors stored in another dtype are read back in theirs.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Mapping[str, TensorLayout],
        model_config: Mapping[str, Any],
        floats: Mapping[str, TensorHeader],
    ) -> None:
        self._floats = floats
        self._places = _places(layouts, model_config)
        headers = read_gguf_header(find_gguf(folder) or folder / FILE_NAME).tensors
        computed = rope_tensors(clean_config(dict(model_config)).to_dict())
        used = {place.name for place in self._places.values()} | set(computed)
        self.tensors = {name: header for name, header in headers.items() if name not in used}
        for name, place in self._places.items():
            if place.name in headers:
                self.tensors[name] = stored_part(headers[place.name], place)
        self._source = Source(folder, self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called ``name`` on the CPU: codes as bytes, others as the checkpoint has them."""
        tensor = self._source.read(name)
        return tensor.to(TORCH_DTYPES[self._floats[name].dtype]) if name in self._floats else tensor

    def rows(self, name: str) -> Rows:
        """Return a function that reads rows of the tensor called ``name``, as ``read`` does."""
        rows_of_file = self._source.rows(name)
        dtype = TORCH_DTYPES[self._floats[name].dtype] if name in self._floats else None
        return lambda rows: rows_of_file(rows) if dtype is None else rows_of_file(rows).to(dtype)


def _places(layouts: Iterable[str], model_config: Mapping[str, Any]) -> dict[str, Place]:
    places = Places(model_config)
    all_places = {name: places.find(name) for name in layouts}
    return {name: place for name, place in all_places.items() if place is not None}


def _stored(layout: TensorLayout, num_experts: int | None) -> TensorLayout:
    return layout if num_experts is None else TensorLayout(layout.dtype, (num_experts, *layout.shape))


def _writer(path: Path, architecture: str) -> Any:
    from gguf import GGUFWriter

    return GGUFWriter(path, architecture)


def _header_of(file: Path) -> Path:
    """Return the file in which the package ``gguf`` writes a header: it would cut off one that has data."""
    return file.with_name(f"{file.name}.header")


def _general(model_dir: Path) -> dict[str, Any]:
    """Return what a GGUF input says about the model in general: author, license, languages ...; {} for a folder."""
    gguf_file = find_gguf(model_dir)
    fields = {} if gguf_file is None else read_gguf_header(gguf_file).fields
    return {key: value for key, value in fields.items() if key.startswith("general.") and key not in OF_THE_FILE}


def _model_name(model_config: Mapping[str, Any], model_dir: Path) -> str:
    given = str(model_config.get("_name_or_path") or "")
    return given if given and not Path(given).is_absolute() else model_name(model_dir)


def _without_types(name: str) -> str:
    """Return a model's name; without the types if it is that of a GGUF file."""
    return _TYPES.sub("", name.removesuffix(".gguf")) if name.endswith(".gguf") else name


def _file_name(model: str, mix: str | None) -> str:
    return FILE_NAME if mix is None else f"{_in_file_name(model)}-{mix}.gguf"


def _in_file_name(name: str) -> str:
    """Return a model's name without its organization, as a part of a file's name."""
    return re.sub(r"[^\w.+-]+", "-", _without_types(name).rpartition("/")[2]).strip("-.") or "model"


def _file_type(layouts: Mapping[str, TensorLayout], mix: str | None) -> int:
    """Return llama.cpp's number of the mix, or of the type that most bytes of blocks have. Readers only show it."""
    from gguf import LlamaFileType

    if mix is not None:
        return int(LlamaFileType[f"MOSTLY_{mix}"])
    sizes = Counter[str]()
    for layout in layouts.values():
        if layout.dtype in GGUF_BLOCKS:
            sizes[layout.dtype] += layout.num_bytes
    name = sizes.most_common(1)[0][0]
    return int(LlamaFileType[f"MOSTLY_{_MIXES_OF_ONE.get(name, name)}"])
