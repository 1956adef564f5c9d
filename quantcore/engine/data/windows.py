"""Cuts text into token windows: calibration windows from one part of a source, held-out windows from another.

Runtimes begin a text with the tokenizer's special tokens, on which much of the attention of all later tokens rests
(attention sinks, Xiao et al. 2023, arXiv:2309.17453). So every window begins with them, once.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import torch

from quantcore.config.texts import BUILTIN, CalibrationConfig, TextPart, apportion, at_part
from quantcore.data.builtin_text import KINDS, Render, read_kind
from quantcore.data.documents import (
    Document,
    is_prose,
    media_folder,
    read_documents,
    read_documents_with_media,
)
from quantcore.engine.data.media import MediaReader, MediaWindow, is_one_of, text_or_media
from quantcore.engine.data.speech import SpeechReader
from quantcore.engine.model.kinds import Media
from quantcore.errors import CalibrationError

HELD_OUT_SHARE = 0.25
EVERY = round(1 / HELD_OUT_SHARE)  # row
SHUFFLE_ROWS = 1000  # as many as datasets shuffles at a time
SHUFFLE_CHARS = 64 << 20
Tokenize = Callable[[str], list[int]]
Reader = MediaReader | SpeechReader
T = TypeVar("T", bound=Sized)


@dataclass(frozen=True)
class DocumentTokenizer:
    """How the documents of a text become tokens.

    ``begin`` are the tokens that begin a text, and ``separator`` is the one that ends a document. ``render`` converts
    chats to text.
    """

    tokenize: Tokenize
    begin: Sequence[int] = ()
    separator: int | None = None
    render: Render | None = None

    def tokens_of(self, document: str) -> Iterable[int]:
        """Return the tokens of a document without a ``begin`` of its own, and with the ``separator``."""
        tokens = without_begin(self.tokenize(document), self.begin)
        return chain(tokens, () if self.separator is None else (self.separator,))


@dataclass(frozen=True)
class TokenWindows:
    """Token ids. ``calibration_NT`` and ``held_out_NT`` come from different parts of the text and never overlap.

    ``held_out_strata_N`` numbers the source, or the kind of built-in text, that each held-out window is from; None if
    there is one. The media are those of each window if any source has some, and ``placeholders`` the tokens that stand
    for them. ``left_out`` says which of them were not read, if any.
    """

    calibration_NT: torch.Tensor
    held_out_NT: torch.Tensor
    held_out_strata_N: torch.Tensor | None = None
    calibration_media: tuple[Media, ...] = ()
    held_out_media: tuple[Media, ...] = ()
    placeholders: frozenset[int] = frozenset()
    left_out: str = ""

    def is_placeholder(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """Return a mask of the tokens that stand for images or sound."""
        return is_one_of(self.placeholders, ids_NT)


def token_windows(
    calibration: CalibrationConfig,
    tokenizer: DocumentTokenizer,
    *,
    num_held_out: int,
    held_out_len: int,
    fewer: bool = False,
    media: Callable[[], Reader] | None = None,
    hears: Callable[[], bool] = lambda: False,
) -> TokenWindows:
    """Read as much of each source as is needed, tokenize it, and cut it into windows without padding.

    Every window starts with ``tokenizer.begin``; documents lose a ``begin`` of their own, which chat templates write.
    Each source gives its share of both kinds of windows, and they alternate in this proportion. With ``fewer``, a
    source that does not have its share of ``num_held_out`` windows gives those that it has. ``media`` makes the reader
    of sources with images or sound, which are refused without it. A model that ``hears`` reads texts with the sound of
    their rows, if they have any.

    The first three quarters of the prose that is read, or three of four rows, are for calibration: ``num_samples``
    windows chosen with the seed. The rest is held out, the same for every seed. Raises CalibrationError with the number
    of windows that the source can give.
    """
    parts = calibration.parts
    counts_held_out = apportion(num_held_out, [part.share for part in parts])
    found: list[tuple[Windows, Windows]] = []
    reader: Reader | None = None

    def windows_with_media(part: TextPart, *wanted: tuple[int, int]) -> tuple[Windows, Windows]:
        nonlocal reader
        assert media is not None
        reader = reader or media()
        return _media_windows_of(part, reader, calibration.seed, *wanted, fewer=fewer)

    for number, (count, count_held_out) in enumerate(zip(calibration.counts, counts_held_out, strict=True)):
        wanted = (count, calibration.seq_len), (count_held_out, held_out_len)
        with at_part(calibration, number):
            part = parts[number]
            of_text = partial(_windows_of, part, tokenizer, calibration.seed, *wanted, fewer=fewer)
            found.append(text_or_media(part, hears, of_text, media and partial(windows_with_media, part, *wanted)))
    learned, held_out = (_alternating(windows) for windows in zip(*found, strict=True))
    if reader is None:
        return TokenWindows(learned.ids_NT, held_out.ids_NT, held_out.strata_N)
    return TokenWindows(
        learned.ids_NT,
        held_out.ids_NT,
        held_out.strata_N,
        learned.media,
        held_out.media,
        reader.placeholders,
        reader.left_out,
    )


def _media_windows_of(
    part: TextPart, reader: Reader, seed: int, wanted: tuple[int, int], wanted_held_out: tuple[int, int], *, fewer: bool
) -> tuple[Windows, Windows]:
    """Return the windows of a source with images or sound: see ``_windows_of``. Every fourth row is held out."""

    def documents(*, held_out: bool) -> Iterator[Document]:
        for number, document in enumerate(filter(len, read_documents_with_media(part, reader.render))):
            if (number % EVERY == EVERY - 1) == held_out:
                yield document

    folder = media_folder(part)
    learned = reader.windows(shuffled(documents(held_out=False), seed), *wanted, folder)
    rest = reader.windows(documents(held_out=True), *wanted_held_out, folder)
    num_held_out = max(1, min(wanted_held_out[0], len(rest))) if fewer else wanted_held_out[0]
    _check_enough(part, (len(learned), *wanted), (len(rest), num_held_out, wanted_held_out[1]), reader.left_out)
    return _stacked(learned, wanted[1]), _stacked(rest, wanted_held_out[1])


def _stacked(found: Sequence[MediaWindow], length: int) -> Windows:
    ids = [window.ids_T for window in found]
    return Windows(torch.stack(ids) if ids else torch.empty(0, length, dtype=torch.long), tuple(w.media for w in found))


def _windows_of(
    part: TextPart,
    tokenizer: DocumentTokenizer,
    seed: int,
    wanted: tuple[int, int],
    wanted_held_out: tuple[int, int],
    *,
    fewer: bool,
) -> tuple[Windows, Windows]:
    """Return the (number, length) of calibration windows and of held-out ones that are wanted of one source."""
    (num_samples, seq_len), (num_held_out, held_out_len) = wanted, wanted_held_out
    begin, tokens_of = tokenizer.begin, tokenizer.tokens_of
    num_tokens = num_samples * (seq_len - len(begin))
    num_held_out_tokens = num_held_out * (held_out_len - len(begin))
    if part.source == BUILTIN:
        divided = [_divide_all(read_kind(kind, tokenizer.render), tokens_of) for kind in KINDS]
    elif is_prose(part):
        enough = max(num_tokens / (1 - HELD_OUT_SHARE), num_held_out_tokens / HELD_OUT_SHARE)
        divided = [_divide_prose(read_documents(part, tokenizer.render), tokens_of, 1.1 * enough)]
    else:
        documents = read_documents(part, tokenizer.render)
        divided = [_divide_rows(documents, tokens_of, seed, num_tokens, num_held_out_tokens)]
    pools = [_cut(text, seq_len, begin) for text, _ in divided]
    held_out = [_cut(rest, held_out_len, begin) for _, rest in divided]
    sizes, sizes_held_out = [len(pool) for pool in pools], [len(pool) for pool in held_out]
    if fewer:
        num_held_out = max(1, min(num_held_out, sum(sizes_held_out)))
    _check_enough(part, (sum(sizes), num_samples, seq_len), (sum(sizes_held_out), num_held_out, held_out_len))
    random_numbers = torch.Generator().manual_seed(seed)
    counts, counts_held_out = apportion(num_samples, sizes), apportion(num_held_out, sizes_held_out)
    drawn = [torch.randperm(size, generator=random_numbers)[:count] for size, count in zip(sizes, counts, strict=True)]
    spread = [  # over the held-out part
        torch.linspace(0, size - 1, count).long() for size, count in zip(sizes_held_out, counts_held_out, strict=True)
    ]
    return (
        _alternating([Windows(pool[places]) for pool, places in zip(pools, drawn, strict=True)]),
        _alternating([Windows(pool[places]) for pool, places in zip(held_out, spread, strict=True)]),
    )


def _check_enough(
    part: TextPart, learned: tuple[int, int, int], held_out: tuple[int, int, int], left_out: str = ""
) -> None:
    """Raise CalibrationError if there are not enough windows; both triples are found, needed, and their length.

    ``left_out`` says what was not read.
    """
    if learned[0] >= learned[1] and held_out[0] >= held_out[1]:
        return
    raise CalibrationError(
        f"The source '{part.source}' gives {learned[0]} calibration windows of {learned[2]} tokens and "
        f"{held_out[0]} held-out ones of {held_out[2]}; {learned[1]} and {held_out[1]} are needed. {left_out}".strip(),
        code="not_enough_samples",
        hint=f"Lower num_samples, {'change' if left_out else 'lower'} seq_len, or use more data.",
        field="/calibration/num_samples",
    )


@dataclass(frozen=True)
class Windows:
    """Token ids [N, T] of windows, their media (() if no window has any), and the number of the text each is from."""

    ids_NT: torch.Tensor
    media: tuple[Media, ...] = ()
    strata_N: torch.Tensor | None = None


def _alternating(windows: Sequence[Windows]) -> Windows:
    """Join the windows of the sources so that any run of them has about their proportion; the order is fixed."""
    places = [(torch.arange(len(part.ids_NT), dtype=torch.float64) + 0.5) / len(part.ids_NT) for part in windows]
    order = torch.cat(places).argsort(stable=True)
    media = [one for part in windows for one in part.media or [{}] * len(part.ids_NT)]
    return Windows(
        torch.cat([part.ids_NT for part in windows])[order],
        tuple(media[place] for place in order) if any(media) else (),
        _strata(windows)[order],
    )


def _strata(windows: Sequence[Windows]) -> torch.Tensor:
    """Number the texts of all ``windows`` one after the other: [N]."""
    strata, num_strata = [], 0
    for part in windows:
        own_N = torch.zeros(len(part.ids_NT), dtype=torch.long) if part.strata_N is None else part.strata_N
        strata.append(own_N + num_strata)
        num_strata = int(strata[-1].max()) + 1 if len(own_N) else num_strata
    return torch.cat(strata)


def _divide_all(documents: Iterable[str], tokens_of: Callable[[str], Iterable[int]]) -> tuple[array[int], array[int]]:
    """Return all documents in order, every fourth one in the held-out part."""
    text, rest = array("q"), array("q")
    for number, document in enumerate(documents):
        (rest if number % EVERY == EVERY - 1 else text).extend(tokens_of(document))
    return text, rest


def _divide_prose(
    documents: Iterator[str], tokens_of: Callable[[str], Iterable[int]], enough: float
) -> tuple[array[int], array[int]]:
    """Return the calibration part and the held-out part; reading stops after more than ``enough`` tokens."""
    stream = array("q")
    for document in documents:
        stream.extend(tokens_of(document))
        if len(stream) > enough:
            break
    border = int(len(stream) * (1 - HELD_OUT_SHARE))
    return stream[:border], stream[border:]


def _divide_rows(
    documents: Iterator[str], tokens_of: Callable[[str], Iterable[int]], seed: int, wanted: int, wanted_held_out: int
) -> tuple[array[int], array[int]]:
    """Return at least the wanted tokens of each part, if the source has them; every fourth text row is held out."""
    text, rest = array("q"), array("q")

    def remaining() -> Iterator[str]:
        """Yield the rows for calibration, and collect the held-out ones."""
        for number, document in enumerate(filter(None, documents)):
            if number % EVERY != EVERY - 1:
                yield document
            elif len(rest) < wanted_held_out:
                rest.extend(tokens_of(document))

    for document in shuffled(remaining(), seed):
        if len(text) < wanted:
            text.extend(tokens_of(document))
        if len(text) >= wanted and len(rest) >= wanted_held_out:
            break
    return text, rest


def shuffled(documents: Iterable[T], seed: int) -> Iterator[T]:
    """Shuffle documents by the seed, with at most SHUFFLE_ROWS of them in memory.

    Each new document replaces one drawn at random, which is yielded; at the end the rest follows in random order. Only
    ``random()`` is used, because Python keeps its sequence the same across versions.
    """
    draw = random.Random(seed).random
    waiting: list[T] = []
    num_chars = 0
    for document in documents:
        if len(waiting) < SHUFFLE_ROWS and num_chars < SHUFFLE_CHARS:
            waiting.append(document)
            num_chars += len(document)
            continue
        place = int(draw() * len(waiting))
        yield waiting[place]
        waiting[place] = document
    while waiting:
        place = int(draw() * len(waiting))
        waiting[place], waiting[-1] = waiting[-1], waiting[place]
        yield waiting.pop()


def _cut(stream: array[int], length: int, begin: Sequence[int]) -> torch.Tensor:
    """Cut consecutive windows [N, length], each after ``begin``; a rest that fills no window is dropped."""
    size = length - len(begin)
    count = len(stream) // size
    return begun(stream, [window * size for window in range(count)], length, begin)[1]


def begun(
    stream: array[int], starts: Iterable[int], length: int, begin: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """Return windows [N, length] of ``begin`` and the tokens from each of ``starts`` on, and where these really start.

    A window whose text has ``begin`` at its start, as templates write it before a turn, starts before that: no window
    begins with it twice.
    """
    size, first = length - len(begin), array("q", begin)
    places = [start - len(first) if first and _is_at(stream, start, first) else start for start in starts]
    rows = [[*first, *stream[place : place + size]] for place in places]
    return places, torch.tensor(rows, dtype=torch.long).view(len(rows), length)


def without_begin(ids: Sequence[int], begin: Sequence[int]) -> Sequence[int]:
    """Return a document's tokens without the ``begin`` at their start, if they have it: windows get their own."""
    return ids[len(begin) :] if begin and tuple(ids[: len(begin)]) == tuple(begin) else ids


def _is_at(stream: array[int], start: int, tokens: array[int]) -> bool:
    return start >= len(tokens) and stream[start : start + len(tokens)] == tokens
