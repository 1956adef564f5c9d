"""Importance matrices of llama.cpp (``llama-imatrix``): the mean square of every input of the layers of a model.

It is the diagonal of ``Stats.gram_II``, found by somebody else on another text; what inputs have in common with each
other is not in it. Both forms of the file are read. GGUF: the sums of squares ``NAME.in_sum2`` [M, I] and the numbers
of tokens ``NAME.counts`` [M, 1], for each tensor NAME of llama.cpp's with M matrices, one for each expert. The older
form: the same sums, divided by the tokens of each expert and multiplied by a number that comes with them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy
import torch

from quantcore.checkpoint.artifact import written_whole
from quantcore.data.imatrix import HINT, find_imatrix
from quantcore.engine.calibration.stats import Stats
from quantcore.errors import CalibrationError
from quantcore.export.gguf.header import read_gguf_header
from quantcore.export.gguf.tensor_names import Place
from quantcore.sandbox.opening import open_named
from quantcore.tensors.source import Source

SUMS, SQUARES, COUNTS = ".in_sum", ".in_sum2", ".counts"
DATASETS, NUM_CHUNKS, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
MAX_ENTRIES, MAX_NAME, MAX_VALUES = 200_000, 4096, 1 << 26
OTHER_MODEL = "It was made for another model. Give the file of this one, or leave imatrix out."
NAMED = 3
"""The number of layers that a warning names."""


@dataclass(frozen=True)
class Entry:
    """What a file says of one tensor: the mean squares [M, I] of the inputs, and the tokens [M] that they are of.

    A matrix of a file in the older form has an unknown number of tokens: 1.
    """

    mean_square_MI: torch.Tensor
    num_tokens_M: torch.Tensor


@dataclass(frozen=True)
class GivenInputs:
    """The mean squares [I] of the inputs of layers, by name, in place of calibration; ``warnings`` say what is missing.

    A layer without an entry, or an expert without tokens, counts all of its inputs alike: ones.
    """

    mean_squares: Mapping[str, torch.Tensor]
    num_tokens: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    def stats(self, layer: str, device: torch.device, owner: int = 0) -> Stats:
        """Return the statistics of a layer's input, on ``device``."""
        return Stats.of_mean_squares(self.mean_squares[layer].to(device), self.num_tokens[layer], owner)


def read_imatrix(path: Path) -> dict[str, Entry]:
    """Return the entries of an importance matrix by llama.cpp's names of tensors.

    Raises CalibrationError: ``imatrix_not_found``, and ``invalid_imatrix`` for a file of another kind, a damaged one,
    or values that are no mean squares.
    """
    try:
        with open_named(find_imatrix(path)) as file:
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            entries = _of_gguf(path) if is_gguf else _of_older_form(file)
    except (ValueError, struct.error) as error:
        raise _invalid(path, str(error)) from error
    for name, entry in entries.items():
        if not torch.isfinite(entry.mean_square_MI).all() or (entry.mean_square_MI < 0).any():
            raise _invalid(path, f"the values of '{name}' are not all finite and at least 0")
    return entries


def _of_gguf(path: Path) -> dict[str, Entry]:
    header = read_gguf_header(path)
    if header.fields.get("general.type") != "imatrix":
        kind = header.fields.get("general.type", "model")
        raise ValueError(f"it is a GGUF file of the type '{kind}'")
    source, entries = Source(path.parent, dict(header.tensors)), {}
    for name in header.tensors:
        if not name.endswith(SQUARES):
            continue
        base = name.removesuffix(SQUARES)
        if f"{base}{COUNTS}" not in header.tensors:
            raise ValueError(f"it has no counts of '{base}'")
        counts_M = source.read(f"{base}{COUNTS}").float().flatten()
        sums_MI = source.read(name).float()
        if not len(counts_M) or sums_MI.numel() % len(counts_M):
            raise ValueError(f"'{base}' has {len(counts_M)} counts for {sums_MI.numel()} sums")
        sums_MI = sums_MI.view(len(counts_M), -1)
        entries[base] = Entry(_alike_without_tokens(sums_MI, counts_M), counts_M.long())
    if not entries:
        raise ValueError("it has no sums of squares")
    return entries


def _alike_without_tokens(sums_MI: torch.Tensor, counts_M: torch.Tensor) -> torch.Tensor:
    """Return the mean squares; ones for a matrix that no token reached, as in llama.cpp's own tool."""
    means_MI = sums_MI / counts_M.clamp(min=1).unsqueeze(1)
    means_MI[counts_M <= 0] = 1.0
    return means_MI


def _of_older_form(file: BufferedReader) -> dict[str, Entry]:
    """Read entries of a name, a factor and the values; what follows them (chunks, the name of a text) is not needed."""
    num_entries = _int(file)
    if not 0 < num_entries <= MAX_ENTRIES:
        raise ValueError("it is neither a GGUF file nor an importance matrix of the older form")
    entries = {}
    for _ in range(num_entries):
        name = _take(file, _int(file), MAX_NAME).decode("utf-8")
        factor, num_values = _int(file), _int(file)
        values = numpy.frombuffer(_take(file, 4 * num_values, 4 * MAX_VALUES), dtype="<f4")
        mean_square_MI = torch.from_numpy(values.copy())[None] / max(1, factor)
        entries[name] = Entry(mean_square_MI, torch.ones(1, dtype=torch.long))
    return entries


def _int(file: BufferedReader) -> int:
    return int(struct.unpack("<i", file.read(4))[0])


def _take(file: BufferedReader, num_bytes: int, most: int) -> bytes:
    data = file.read(num_bytes) if 0 < num_bytes <= most else b""
    if not data or len(data) != num_bytes:
        raise ValueError("it ends too early, or a length in it is wrong")
    return data


def inputs_of_layers(
    path: Path, entries: Mapping[str, Entry], places: Mapping[str, Sequence[Place]], widths: Mapping[str, int]
) -> GivenInputs:
    """Return what the ``entries`` of the file at ``path`` say of the layers in ``widths``: name -> number of inputs.

    ``places``: where the tensors of the model lie in a GGUF file. Raises CalibrationError ``imatrix_does_not_fit`` for
    the file of another model: one that names a tensor which this model does not have, that has other numbers of inputs
    or experts, or no entry for any layer of some block.
    """
    known = {place.name for found in places.values() for place in found}
    if foreign := sorted(name for name in entries if name not in known):
        raise _does_not_fit(path, f"it has entries for {len(foreign)} tensor(s) that this model does not have, first"
                            f" '{foreign[0]}'")  # fmt: skip
    mean_squares, num_tokens = {}, {}
    missing, unused = [], []
    for layer, width in widths.items():
        place = next((place for place in places.get(f"{layer}.weight", ()) if place.name in entries), None)
        if place is None:
            mean_squares[layer], num_tokens[layer] = torch.ones(width), 0
            missing.append(layer)
            continue
        mean_squares[layer], num_tokens[layer] = _of_matrix(path, entries[place.name], place, width)
        unused += [layer] if num_tokens[layer] == 0 else []
    _check_blocks(path, places, entries)
    return GivenInputs(mean_squares, num_tokens, (
        *_named("has no entry for", missing), *_named("saw no token of", unused),
    ))  # fmt: skip


def _of_matrix(path: Path, entry: Entry, place: Place, width: int) -> tuple[torch.Tensor, int]:
    """Return the mean squares and the number of tokens of a layer: of the whole entry, or of one expert."""
    values, counts_M = entry.mean_square_MI.flatten(), entry.num_tokens_M
    num_matrices = values.numel() // width
    if values.numel() % width or (place.index or 0) >= num_matrices or (place.index is None and num_matrices != 1):
        shown = "" if place.index is None else f" of expert {place.index}"
        raise _does_not_fit(
            path,
            f"'{place.name}' has {values.numel()} values for {len(counts_M)} matrices, and the layer{shown} has"
            f" {width} inputs",
        )
    index = place.index or 0
    own_I = values[index * width : (index + 1) * width]
    count = counts_M[index] if len(counts_M) == num_matrices else counts_M[0]
    return _moved(own_I, place.moved_heads[::-1]).clone(), int(count)


def in_file(x_I: torch.Tensor, place: Place) -> torch.Tensor:
    """Return values of the inputs of a layer in the order that the inputs have in a GGUF file."""
    return _moved(x_I, place.moved_heads)


def _moved(x_I: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """Return the values of heads [A, B] of inputs as those of [B, A]; without ``heads`` as they are."""
    return x_I.reshape(*heads, -1).transpose(0, 1).flatten() if heads else x_I


def _check_blocks(path: Path, places: Mapping[str, Sequence[Place]], entries: Mapping[str, Entry]) -> None:
    """Raise CalibrationError if the file is of a model with fewer blocks."""
    blocks = {_block(place.name) for found in places.values() for place in found} - {None}
    named = {_block(name) for name in entries}
    if blocks - named:
        raise _does_not_fit(path, f"it has entries for {len(named & blocks)} of the {len(blocks)} blocks of this model")


def _block(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "blk" else None


def _named(what: str, layers: Sequence[str]) -> tuple[str, ...]:
    if not layers:
        return ()
    more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    return (
        f"The importance matrix {what} {len(layers)} layer(s), whose inputs count alike: {', '.join(layers[:NAMED])}"
        f"{more}.",
    )


def _invalid(path: Path, reason: str) -> CalibrationError:
    return CalibrationError(
        f"{path} cannot be read as an importance matrix: {reason}.",
        code="invalid_imatrix", hint=HINT, field="/algo_config",
    )  # fmt: skip


def _does_not_fit(path: Path, reason: str) -> CalibrationError:
    return CalibrationError(
        f"The importance matrix {path} does not fit this model: {reason}.",
        code="imatrix_does_not_fit", hint=OTHER_MODEL, field="/algo_config",
    )  # fmt: skip


@dataclass(frozen=True)
class InputSums:
    """Sums over the tokens that reached one layer: of the inputs and of their squares, float64 [I]."""

    sum_I: torch.Tensor
    square_I: torch.Tensor
    num_tokens: int


def write_imatrix(path: Path, tensors: Mapping[str, Sequence[InputSums]], settings: Mapping[str, Any]) -> None:
    """Write the sums of the matrices of each tensor, by llama.cpp's names, in the GGUF form that llama-quantize reads.

    ``settings`` are the fields ``DATASETS``, ``NUM_CHUNKS`` and ``CHUNK_SIZE``. The file appears whole.
    """
    from gguf import GGUFWriter

    with written_whole(path) as scratch:
        writer = GGUFWriter(scratch, "")
        writer.kv_data[0].clear()  # an architecture, which such a file does not have
        writer.add_type("imatrix")
        writer.add_array(DATASETS, list(settings[DATASETS]))
        writer.add_uint32(NUM_CHUNKS, settings[NUM_CHUNKS])
        writer.add_uint32(CHUNK_SIZE, settings[CHUNK_SIZE])
        for name in sorted(tensors):
            parts = tensors[name]
            writer.add_tensor(f"{name}{SQUARES}", torch.stack([part.square_I for part in parts]).float().numpy())
            counts = numpy.array([[part.num_tokens] for part in parts], dtype=numpy.float32)
            writer.add_tensor(f"{name}{COUNTS}", counts)
            writer.add_tensor(f"{name}{SUMS}", torch.stack([part.sum_I for part in parts]).float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
