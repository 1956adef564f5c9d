"""The text that a model is evaluated on: windows of tokens, their scored parts, numbers of words and bytes.

Windows begin as the model's tokenizer begins a text, and those tokens are never scored. A causal model predicts every
token from those before it, a masked one the tokens that are masked, and a sequence-to-sequence model the second half of
each window from its first half. A speech model predicts every token, too; text-only windows get empty audio.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quantcore.config.task import EvaluationConfig, Task
from quantcore.data.documents import media_folder, read_documents, read_documents_with_media
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.media import MediaReader, is_one_of, text_or_media
from quantcore.engine.data.speech import SpeechReader
from quantcore.engine.data.tokenizer import begin_of_text, load_tokenizer, tokenize_with
from quantcore.engine.data.windows import DocumentTokenizer, Reader, TokenWindows, begun
from quantcore.engine.model.kinds import Kind, Media, halves
from quantcore.engine.model.skeleton import kind_of
from quantcore.errors import CalibrationError
from quantcore.importing.model import read_model
from quantcore.tensors.hashing import tensor_sha256
from quantcore.tensors.source import TORCH_DTYPES

OVERLAP_LEN = 32  # tokens: shorter pieces are the same in many texts
ENCODERS = (Kind.masked, Kind.scores, Kind.embedding)
MASKED_SHARE = 0.15
"""Share of the tokens that are masked, as in the training of BERT (arXiv:1810.04805)."""
HASH_BASE = 6364136223846793005  # Knuth's multiplier for numbers modulo 2^64


@dataclass(frozen=True)
class EvaluationText:
    """Windows of token ids, all of one length T, and their scored parts.

    ``first_N``: the first scored place of each window, counted from 0; places before it are only context, and so is
    place 0 in any case.
    ``num_words`` and ``num_bytes`` are those of the scored text. ``targets_NP``: the token that each of the P outputs
    of a model predicts, -1 where none is scored; None if output t predicts token t + 1. ``media`` are those of each
    window, if any has some: tokens that stand for them are not scored. ``strata_N`` numbers the texts that give a fixed
    number of windows each; None for one text.
    """

    ids_NT: torch.Tensor
    first_N: torch.Tensor
    num_words: int
    num_bytes: int
    targets_NP: torch.Tensor | None = None
    media: tuple[Media, ...] = ()
    strata_N: torch.Tensor | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The tokens and the digests of the media, as JSON data: the key of what is cached for this text."""
        media = [{name: tensor_sha256(value) for name, value in one.items()} for one in self.media]
        return {"windows": self.ids_NT.tolist()} | ({"media": media} if media else {})

    def prompts(self, num: int, length: int) -> torch.Tensor:
        """Return up to ``num`` beginnings of windows, or ends of windows with media, of ``length`` tokens of text."""
        if not self.media or self.targets_NP is None:
            return self.ids_NT[:num, :length]
        is_text = (self.targets_NP[:, -length:] >= 0).all(1)
        return self.ids_NT[is_text][:num, -length:]

    @property
    def predicted_NP(self) -> torch.Tensor:
        """The token that each output predicts."""
        return self.ids_NT[:, 1:] if self.targets_NP is None else self.targets_NP.clamp(min=0)

    @property
    def scored_NP(self) -> torch.Tensor:
        """The mask of the outputs that are scored, bool."""
        if self.targets_NP is not None:
            return self.targets_NP >= 0
        return torch.arange(1, self.ids_NT.shape[1]) >= self.first_N[:, None]


def of_windows(ids_NT: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    """Return independent windows, in which every token is scored except what begins a text, and the first in any case.

    The first token of a window that nothing begins has no context.
    """
    first = max(1, len(begin_of_text(tokenizer)))
    counts = _count(tokenizer, [ids[first:] for ids in ids_NT.tolist()])
    return EvaluationText(ids_NT, torch.full((len(ids_NT),), first, dtype=torch.long), *counts)


def of_held_out(windows: TokenWindows, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    """Return the held-out ``windows``, in which tokens that stand for images or sound are not scored."""
    ids_NT = windows.held_out_NT
    text = replace(of_windows(ids_NT, tokenizer), strata_N=windows.held_out_strata_N)
    return _with_media(text, windows.held_out_media, windows.is_placeholder(ids_NT), tokenizer)


def _with_media(
    text: EvaluationText, media: Sequence[Media], is_placeholder_NT: torch.Tensor, tokenizer: PreTrainedTokenizerBase
) -> EvaluationText:
    if not any(media):
        return text
    targets_NP = text.ids_NT[:, 1:].masked_fill(is_placeholder_NT[:, 1:], -1)
    return replace(scoring(text, targets_NP, tokenizer), media=tuple(media))


def scoring(text: EvaluationText, targets_NP: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    """Return ``text`` with the tokens that its outputs predict, -1 where none is scored."""
    num_words, num_bytes = _count(tokenizer, [row[row >= 0].tolist() for row in targets_NP])
    return replace(text, targets_NP=targets_NP, num_words=num_words, num_bytes=num_bytes)


def of_stream(
    ids: array[int], tokenizer: PreTrainedTokenizerBase, seq_len: int, stride: int, begin: Sequence[int] = ()
) -> EvaluationText:
    """Cut a text into windows of ``begin`` and the text's tokens from every ``stride``-th token on.

    The text fills at least one window. Every token of it is scored once, with at least ``seq_len - stride`` tokens
    before it if the text has so many; without ``begin`` the first one has no context and is not. The last window is
    moved to the left to end with the text.
    """
    size, num_begin = seq_len - len(begin), len(begin)
    starts, windows_NT = begun(ids, [*range(0, len(ids) - size, stride), len(ids) - size], seq_len, begin)
    ends = [0 if begin else 1, *(start + size for start in starts)]
    first = torch.tensor([num_begin + end - start for start, end in zip(starts, ends, strict=False)])
    return EvaluationText(windows_NT, first, *_count(tokenizer, [ids[ends[0] :].tolist()]))


def overlap(calibration_NT: torch.Tensor, held_out_NT: torch.Tensor) -> float:
    """Return the share of spans of ``OVERLAP_LEN`` held-out tokens that also occur in the calibration windows."""
    if min(calibration_NT.shape[1], held_out_NT.shape[1]) < OVERLAP_LEN:
        return 0.0
    calibration_spans, spans = _hashes(calibration_NT), _hashes(held_out_NT)[:, ::OVERLAP_LEN]
    return torch.isin(spans, calibration_spans).double().mean().item()


def _hashes(ids_NT: torch.Tensor) -> torch.Tensor:
    """Return a hash (int64) of the OVERLAP_LEN tokens from each position on; equal tokens give equal hashes."""
    num = ids_NT.shape[1] - OVERLAP_LEN + 1
    result = torch.zeros(len(ids_NT), num, dtype=torch.long)
    for place in range(OVERLAP_LEN):
        result = result * HASH_BASE + ids_NT[:, place : place + num]
    return result


def _count(tokenizer: PreTrainedTokenizerBase, pieces: list[list[int]]) -> tuple[int, int]:
    """Count the words and UTF-8 bytes of the text of the ids."""
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in pieces]
    return sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)


def evaluation_text(task: Task, windows: TokenWindows, kind: Kind) -> EvaluationText:
    """Return the text that the task names, else the held-out ``windows``, for a model of ``kind``."""
    folder, tokenizer = task.model_folder, load_tokenizer(task.model_folder)
    text = read_text(task.evaluation, folder) if has_own_text(task) else of_held_out(windows, tokenizer)
    return for_kind(text, kind, tokenizer)


def for_kind(text: EvaluationText, kind: Kind, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    """Return the windows of ``text`` as a model of ``kind`` reads them, with the tokens that it predicts."""
    if kind is Kind.causal:
        return text
    ids_NT = with_special_tokens(text.ids_NT, kind, tokenizer)
    if kind is Kind.sequence_to_sequence:
        targets_NP = halves(ids_NT)[1]
    elif kind is Kind.speech:
        targets_NP = ids_NT
    elif kind is Kind.masked:
        ids_NT, targets_NP = _masked(ids_NT, tokenizer)
    else:
        targets_NP = ids_NT[:, :0]  # it predicts no tokens
    return scoring(replace(text, ids_NT=ids_NT), targets_NP.clone(), tokenizer)


def with_special_tokens(ids_NT: torch.Tensor, kind: Kind, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return windows [N, T] of which an encoder's begin and end with the tokens around a text, as in its training."""
    if kind in ENCODERS:
        ids_NT = ids_NT.clone()
        before = begin_of_text(tokenizer) or ((tokenizer.cls_token_id,) if tokenizer.cls_token_id is not None else ())
        ids_NT[:, : len(before)] = torch.tensor(before, dtype=ids_NT.dtype)
        if tokenizer.sep_token_id is not None:
            ids_NT[:, -1] = tokenizer.sep_token_id
    return ids_NT


def begin_of_windows(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that begin every window of text for the model in ``folder``, as its tokenizer begins a text.

    Windows of an encoder get the tokens on both sides later (``with_special_tokens``), and the decoder of a speech
    model gets its start token with each call: they have none.
    """
    kind = kind_of(read_model(folder).headers.config)
    return begin_of_text(tokenizer) if kind in (Kind.causal, Kind.sequence_to_sequence) else ()


def document_tokenizer(
    folder: Path, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> DocumentTokenizer:
    """Return how documents become tokens of the model in ``folder``; its chat template gets ``arguments``."""
    return DocumentTokenizer(
        tokenize_with(tokenizer),
        begin_of_windows(folder, tokenizer),
        tokenizer.eos_token_id,
        chat_renderer(tokenizer, arguments),
    )


def _masked(ids_NT: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows with masked tokens, and the tokens that were there; without a mask token all are scored."""
    if tokenizer.mask_token_id is None:
        return ids_NT, ids_NT
    is_masked = torch.rand(ids_NT.shape, generator=torch.Generator().manual_seed(0)) < MASKED_SHARE
    is_masked[:, [0, -1]] = False
    return ids_NT.masked_fill(is_masked, tokenizer.mask_token_id), ids_NT.masked_fill(~is_masked, -1)


def has_own_text(task: Task) -> bool:
    """Return True if the evaluation has its own text."""
    return task.evaluation.source is not None and task.evaluation.num_windows > 0


def media_reader(folder: Path, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Reader:
    """Return what reads images and sound as the model in ``folder`` does; ``arguments`` are its chat template's."""
    headers = read_model(folder).headers
    dtype = TORCH_DTYPES[headers.main_dtype]
    if kind_of(headers.config) is Kind.speech:
        return SpeechReader(folder, headers.config, tokenizer, tokenize_with(tokenizer), dtype)
    return MediaReader(folder, headers.config, tokenizer, arguments, dtype)


def hears(folder: Path) -> bool:
    """Return True for a model that predicts a transcript of audio."""
    return kind_of(read_model(folder).headers.config) is Kind.speech


def read_text(evaluation: EvaluationConfig, folder: Path) -> EvaluationText:
    """Read the windows that ``evaluation`` requests, or fewer, from the start of its own ``source``.

    Documents are joined, each followed by the end-of-text token. Those with images or sound are read as the model in
    ``folder`` reads them, and not with a stride. Raises CalibrationError with the source's length.
    """
    tokenizer, part = load_tokenizer(folder), evaluation.text
    assert part is not None

    def with_media() -> EvaluationText:
        reader = media_reader(folder, tokenizer, evaluation.chat_template_kwargs)
        return _read_media(evaluation, reader, tokenizer)

    def text_alone() -> EvaluationText:
        return _read_text(evaluation, tokenizer, document_tokenizer(folder, tokenizer, evaluation.chat_template_kwargs))

    return text_or_media(part, lambda: hears(folder), text_alone, with_media)


def _read_media(evaluation: EvaluationConfig, reader: Reader, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    part = evaluation.text
    assert part is not None
    documents = filter(len, read_documents_with_media(part, reader.render))
    windows = reader.windows(documents, evaluation.num_windows, evaluation.seq_len, media_folder(part))
    if not windows:
        raise _too_short(evaluation, f"is too short for a window of {evaluation.seq_len} tokens")
    ids_NT = torch.stack([window.ids_T for window in windows])
    media = [window.media for window in windows]
    return _with_media(of_windows(ids_NT, tokenizer), media, is_one_of(reader.placeholders, ids_NT), tokenizer)


def _read_text(
    evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, documents: DocumentTokenizer
) -> EvaluationText:
    text = evaluation.text
    assert text is not None
    size = evaluation.seq_len - len(documents.begin)
    stride = min(evaluation.stride or size, size)
    num_tokens = size + stride * (evaluation.num_windows - 1)
    stream = array("q")
    for document in read_documents(text, documents.render):
        if document:
            stream.extend(documents.tokens_of(document))
        if len(stream) >= num_tokens:
            break
    if len(stream) < size:
        raise _too_short(evaluation, f"has {len(stream)} tokens; a window has {size} tokens of text")
    return of_stream(stream[:num_tokens], tokenizer, evaluation.seq_len, stride, documents.begin)


def _too_short(evaluation: EvaluationConfig, what: str) -> CalibrationError:
    return CalibrationError(
        f"The text '{evaluation.source}' {what}.",
        code="not_enough_samples",
        hint="Lower the evaluation's seq_len or use more text; for large images, raise seq_len.",
        field="/evaluation/seq_len",
    )
