"""Reads the header of a GGUF file (versions 2 and 3): its fields and the offsets of its tensors. No torch.

The file is not trusted: every length is checked against the rest of the file, and the whole header is bounded. Long
lists (tokens, merges, scores) are skipped: a plan needs none, and tokenizers are read by Transformers.

Layout, little-endian: ``GGUF``, version, numbers of tensors and fields; each field's name, type and value; each
tensor's name, sides (the innermost first), type and offset from where the data begins, at a multiple of the alignment.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantcore.checkpoint.folder import gguf_parts
from quantcore.checkpoint.layout import DTYPE_BYTES, GGUF_BLOCKS, TensorHeader
from quantcore.errors import ModelError
from quantcore.sandbox.opening import open_file

MAX_HEADER_BYTES = 128 << 20  # 256 thousand tokens with their merges and scores take about 20 MB
MAX_FIELDS = 10_000
MAX_TENSORS = 200_000
LONGEST_KEPT = 4096  # elements; layers have lists, too
ALIGNMENT = 32
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of numbers, with their ``struct`` format characters."""
FLOAT32, TEXT, ARRAY = 6, 8, 9
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 41: "Q1_0"}


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file, or of all parts of one that is split.

    ``fields`` by name, without the long lists; ``tensors`` by name, rows of blocks as bytes.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]

    def read_floats(self, name: str) -> list[float]:
        """Return the values of a small float32 tensor."""
        header = self.tensors[name]
        with open_file(self.path.with_name(header.file)) as file:
            file.seek(header.begin)
            return list(struct.unpack(f"<{header.num_bytes // 4}f", file.read(header.num_bytes)))


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of the GGUF file at ``path``; for the first part of a split file, with the tensors of all.

    Raises ModelError ``invalid_gguf`` for a damaged file, ``missing_shard`` for a part that is not there or not of this
    file, and ``unsupported_quantization`` for a type not known here.
    """
    header = _read(path)
    count = header.fields.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return header
    parts = gguf_parts(path)
    if len(parts) != count or header.fields.get("split.no") != 0 or parts[0] != path:
        raise ModelError(
            f"{path.name} is one of {count} parts of a model.",
            code="missing_shard",
            hint="Give the first part, with the others beside it, all called as in NAME-00001-of-00003.gguf.",
        )
    tensors = dict(header.tensors)
    for number, part in enumerate(parts[1:], start=1):
        if not part.is_file():
            raise ModelError(
                f"{part.name}, part {number + 1} of {count}, does not exist.",
                code="missing_shard",
                hint="Download all parts of the model into one folder.",
            )
        more = _read(part)
        if more.fields.get("split.no") != number or more.tensors.keys() & tensors.keys():
            raise _not_of_this(part)
        tensors |= more.tensors
    if header.fields.get("split.tensors.count") != len(tensors):
        raise _not_of_this(path)
    return GgufHeader(path, header.fields, tensors)


@dataclass(frozen=True)
class RawHeader:
    """The header of a GGUF file as bytes: its fields, and what it says of each tensor but the offset."""

    num_fields: int
    fields: bytes
    tensors: Mapping[str, bytes]


def read_raw_header(path: Path) -> RawHeader:
    """Return the header of the GGUF file at ``path``, which is one of ours."""
    with open_file(path) as file:
        return _Reader(file, path, os.fstat(file.fileno()).st_size).raw_header()


def _read(path: Path) -> GgufHeader:
    try:
        with open_file(path) as file:
            return _Reader(file, path, os.fstat(file.fileno()).st_size).header()
    except (ValueError, RecursionError) as error:
        raise _invalid(path, str(error)) from error


class _Reader:
    """Reads values one after another. Raises ValueError where the file ends too early or is implausible."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self._path, self._size = file, path, size

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; only 2 and 3 are supported")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
            raise ValueError(f"it declares {num_tensors} tensors and {num_fields} fields")
        fields = dict(self._field() for _ in range(num_fields))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        start = -(-self._file.tell() // alignment) * alignment
        return GgufHeader(self._path, fields, {info[0]: self._tensor(*info, start) for info in infos})

    def raw_header(self) -> RawHeader:
        self._take(len(b"GGUF") + struct.calcsize("<I"))
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        begin = self._file.tell()
        for _ in range(num_fields):
            self._field()
        fields, tensors = self._bytes_since(begin), {}
        for _ in range(num_tensors):
            begin = self._file.tell()
            name, *_ = self._tensor_info()
            tensors[name] = self._bytes_since(begin)[: -struct.calcsize("<Q")]
        return RawHeader(num_fields, fields, tensors)

    def _bytes_since(self, begin: int) -> bytes:
        end = self._file.tell()
        self._file.seek(begin)
        return self._file.read(end - begin)

    def _field(self) -> tuple[str, Any]:
        return self._text(), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        """Return a number, a text or a list; None for a list that is too long to be of use."""
        if kind in NUMBERS:
            number = self._number(NUMBERS[kind])
            return shortest(number) if kind == FLOAT32 else number
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            raise ValueError(f"a field has type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in NUMBERS and count > LONGEST_KEPT:
            self._skip(count * struct.calcsize(NUMBERS[inner]))
            return None
        if inner == TEXT and count > LONGEST_KEPT:
            for _ in range(count):
                self._skip(self._number("Q"))
            return None
        if inner == ARRAY:
            raise ValueError("a field is a list of lists")
        return [self._value(inner) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_sides = self._text(), self._number("I")
        if num_sides > 4:
            raise ValueError(f"'{name}' has {num_sides} sides")
        sides = tuple(self._number("Q") for _ in range(num_sides))
        return name, sides[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> TensorHeader:
        dtype = TYPES.get(kind)
        if dtype is None:
            raise ModelError(
                f"'{name}' in {self._path.name} has GGUF type {OTHER_TYPES.get(kind, kind)}, which is not supported.",
                code="unsupported_quantization",
                hint=f"Supported types: {', '.join((*GGUF_BLOCKS, 'F16', 'BF16', 'F32'))}.",
            )
        if blocks := GGUF_BLOCKS.get(dtype):
            width, num_bytes = blocks
            if len(shape) < 2 or shape[-1] % width:
                raise ValueError(f"rows of '{name}' are not whole blocks")
            shape = (*shape[:-1], shape[-1] // width * num_bytes)
        begin = start + offset
        end = begin + math.prod(shape) * DTYPE_BYTES[dtype]
        if end > self._size:
            raise ValueError(f"it ends before the data of '{name}'")
        return TensorHeader(dtype, shape, self._path.name, begin, end)

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind)))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _take(self, num_bytes: int) -> bytes:
        self._check(num_bytes)
        return self._file.read(num_bytes)

    def _skip(self, num_bytes: int) -> None:
        self._check(num_bytes)
        self._file.seek(num_bytes, 1)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > min(self._size, MAX_HEADER_BYTES) - self._file.tell():
            raise ValueError("its header has the wrong length")


def shortest(number: float) -> float:
    """Return the number with the fewest digits that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    if not math.isfinite(number):
        return number
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    fitting = (short for short in candidates if abs(short) <= LARGEST_FLOAT32)
    return next((short for short in fitting if struct.unpack("<f", struct.pack("<f", short))[0] == number), number)


def _not_of_this(part: Path) -> ModelError:
    return ModelError(
        f"{part.name} is not a part of the same model as the files beside it.",
        code="missing_shard",
        hint="Download all parts of the model again, of the same revision.",
    )


def _invalid(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path.name} cannot be read as GGUF: {reason}.",
        code="invalid_gguf",
        hint="The file is damaged or incomplete: download it again.",
    )
