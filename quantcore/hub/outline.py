"""A model elsewhere as a folder with holes for its weights: enough for a plan, for a few requests of some kB."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantcore.checkpoint.headers import MAX_CONFIG_BYTES, MAX_HEADER_BYTES, read_safetensors_header
from quantcore.errors import ModelError
from quantcore.hub.listing import CARD, CONFIG, INDEX, NUM_CONNECTIONS, PICKLES, Listing, RemoteFile, matches, weights

MAX_SHARDS = 2000
MAX_SPANS = 4000  # spans of small tensors that a plan needs; each is a request
MAX_NEEDED_BYTES = 64 << 20
LARGEST_GAP = 100_000  # bytes between two tensors that one request still fetches together
MAX_CARD_BYTES = 64 << 10
FIRST_BYTES = 100_000  # holds the whole header of nearly every file, so that one request is enough


def draw_outline(listing: Listing, folder: Path, needed: re.Pattern[str] | None = None) -> None:
    """Write the model into ``folder`` with holes for weights.

    Names, sizes, config and headers are true, so that the checks of a local folder work; so are the start of the card
    (README.md) and the tensors that have ``needed`` in their names. The files are sparse: a terabyte of holes takes no
    disk. Raises ModelError ``header_too_large`` and those of ``listing``.
    """
    index = listing.read_index()
    if CONFIG in listing.files:
        _write_outline(folder / CONFIG, listing.read_start(CONFIG, MAX_CONFIG_BYTES), listing.files[CONFIG])
    if INDEX in listing.files:
        _write_outline(folder / INDEX, index, listing.files[INDEX])
    if CARD in listing.files:
        _write_outline(folder / CARD, listing.read_start(CARD, MAX_CARD_BYTES), listing.files[CARD])
    for name in listing.files:
        if matches(name, PICKLES):
            (folder / name).touch()  # only the name, for the error about a model that has only pickles
    names = weights(listing.files, index)
    if len(names) > MAX_SHARDS:
        raise ModelError(f"The model has {len(names)} files of weights.", code="header_too_large")
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        try:
            for name, start in zip(names, pool.map(lambda name: _read_header(listing, name), names), strict=True):
                _write_outline(folder / name, start, listing.files[name])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if needed is not None:
        _fill_in(listing, folder, names, needed)


def _fill_in(listing: Listing, folder: Path, names: list[str], needed: re.Pattern[str]) -> None:
    """Fetch the tensors with ``needed`` in their names into their files; neighbours share a request."""
    spans: list[tuple[str, int, int]] = []
    for file in names:
        headers = read_safetensors_header(folder / file)
        small = sorted((header.begin, header.end) for name, header in headers.items() if needed.search(name))
        for begin, end in small:
            if spans and spans[-1][0] == file and begin - spans[-1][2] < LARGEST_GAP:
                spans[-1] = (file, spans[-1][1], end)
            else:
                spans.append((file, begin, end))
    total_bytes = sum(end - begin for _, begin, end in spans)
    if len(spans) > MAX_SPANS or total_bytes > MAX_NEEDED_BYTES:
        raise ModelError(
            f"Planning for this model would need to download {total_bytes >> 20} MiB in {len(spans)} pieces.",
            code="header_too_large",
            hint="Download it and use its folder.",
        )
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        try:
            parts = pool.map(lambda span: listing.read(span[0], span[1], span[2] - span[1]), spans)
            for (file, begin, _), part in zip(spans, parts, strict=True):
                with (folder / file).open("r+b") as stream:
                    stream.seek(begin)
                    stream.write(part)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write_outline(path: Path, start: bytes, file: RemoteFile) -> None:
    with path.open("wb") as stream:
        stream.write(start[: file.size])
        stream.truncate(file.size)


def _read_header(listing: Listing, name: str) -> bytes:
    """Read a safetensors file up to the end of its header (less if its length is implausible)."""
    start = listing.read_start(name, FIRST_BYTES)
    needed = 8 + int.from_bytes(start[:8], "little")
    if len(start) < needed <= min(listing.files[name].size, 8 + MAX_HEADER_BYTES):
        start = listing.read_start(name, needed)
    return start[:needed]
