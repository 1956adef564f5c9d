"""Splits a GGUF file into parts, as llama.cpp's ``llama-gguf-split`` does. No torch.

The first part has the metadata; each part has whole tensors, in their order. llama.cpp reads the model through the
first part and finds the others by their names.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from quantcore.checkpoint.folder import part_name
from quantcore.checkpoint.layout import TensorHeader
from quantcore.export.gguf.header import ALIGNMENT, read_gguf_header, read_raw_header
from quantcore.sandbox.opening import open_file

UINT16, INT32 = 2, 5
CHUNK_BYTES = 4 << 20


def is_split(sizes: Iterable[int], max_bytes: int) -> bool:
    """Return True if tensors of these sizes in bytes take more than one part."""
    sizes = list(sizes)
    return len(sizes) > 1 and sum(sizes) > max_bytes


def split_gguf(file: Path, folder: Path, max_bytes: int) -> list[Path]:
    """Write the parts of ``file`` to ``folder`` and return their paths. ``file`` stays as it is.

    The tensors of a part take at most ``max_bytes``; a larger tensor gets its own part.
    """
    tensors = read_gguf_header(file).tensors
    groups = list(_grouped(tensors, max_bytes))
    raw = read_raw_header(file)
    parts = [folder / part_name(file.stem, number, len(groups)) for number in range(1, len(groups) + 1)]
    with open_file(file) as source:
        for number, (part, names) in enumerate(zip(parts, groups, strict=True)):
            about = {"split.no": (UINT16, number), "split.count": (UINT16, len(groups))}
            about["split.tensors.count"] = (INT32, len(tensors))
            own = b"".join(_field(name, *value) for name, value in about.items())
            count, kept = (raw.num_fields + 3, raw.fields + own) if number == 0 else (3, own)
            offset, described = 0, b""
            for name in names:
                described += raw.tensors[name] + struct.pack("<Q", offset)
                offset += _padded(tensors[name].num_bytes)
            header = b"GGUF" + struct.pack("<IQQ", 3, len(names), count) + kept + described
            with part.open("wb") as out:
                out.write(header + bytes(_padded(len(header)) - len(header)))
                for name in names:
                    source.seek(tensors[name].begin)
                    _copy(source, out, tensors[name].num_bytes)
                    out.write(bytes(_padded(tensors[name].num_bytes) - tensors[name].num_bytes))
                out.flush()
                os.fsync(out.fileno())
    return parts


def _grouped(tensors: Mapping[str, TensorHeader], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1].begin):
        if names and total + tensor.num_bytes > max_bytes:
            yield names
            names, total = [], 0
        names.append(name)
        total += tensor.num_bytes
    yield names


def _field(name: str, kind: int, value: int) -> bytes:
    raw = name.encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<I" + {UINT16: "H", INT32: "i"}[kind], kind, value)


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def _copy(source: BinaryIO, out: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        chunk = source.read(min(num_bytes, CHUNK_BYTES))
        out.write(chunk)
        num_bytes -= len(chunk)
