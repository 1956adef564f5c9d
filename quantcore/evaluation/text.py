"""The text that a model is evaluated on: windows of tokens, their scored parts, numbers of words and bytes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.tokenizer import load_tokenizer, tokenize_with
from quantcore.config.task import EvaluationConfig, Task
from quantcore.data.chat import chat_renderer
from quantcore.data.documents import read_documents
from quantcore.errors import CalibrationError

OVERLAP_LEN = 32  # tokens: shorter pieces are the same in many texts
HASH_BASE = 6364136223846793005  # Knuth's multiplier for numbers modulo 2^64


@dataclass(frozen=True)
class EvaluationText:
    """Windows of token ids, all of one length T, and their scored parts.

    ``first_N``: the first scored place of each window, 1 or more; places before it are only context.
    ``num_words`` and ``num_bytes`` are those of the scored text.
    """

    ids_NT: torch.Tensor
    first_N: torch.Tensor
    num_words: int
    num_bytes: int

    @property
    def scored_NT(self) -> torch.Tensor:
        """The mask of the scored places among 1 to T - 1, bool [N, T - 1]."""
        return torch.arange(1, self.ids_NT.shape[1]) >= self.first_N[:, None]


def of_windows(ids_NT: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    """Return independent windows, in which every token is scored except the first, which has no context."""
    first = torch.ones(len(ids_NT), dtype=torch.long)
    return EvaluationText(ids_NT, first, *_count(tokenizer, [ids[1:] for ids in ids_NT.tolist()]))


def of_stream(ids_T: torch.Tensor, tokenizer: PreTrainedTokenizerBase, seq_len: int, stride: int) -> EvaluationText:
    """Cut a text of at least ``seq_len`` tokens into windows that start every ``stride`` tokens.

    Every token except the first is scored once, with at least ``seq_len - stride`` tokens before it if the text has so
    many. The last window is moved to the left to end with the text.
    """
    starts = [*range(0, len(ids_T) - seq_len, stride), len(ids_T) - seq_len]
    ends = [1, *(start + seq_len for start in starts)]
    first = torch.tensor([end - start for start, end in zip(starts, ends, strict=False)])
    windows = torch.stack([ids_T[start : start + seq_len] for start in starts])
    return EvaluationText(windows, first, *_count(tokenizer, [ids_T[1:].tolist()]))


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


def evaluation_text(task: Task, held_out_NT: torch.Tensor) -> EvaluationText:
    """Return the text that the task names, else the windows held out from its calibration."""
    tokenizer = load_tokenizer(task.model_folder)
    if has_own_text(task):
        return read_text(task.evaluation, tokenizer)
    return of_windows(held_out_NT, tokenizer)


def has_own_text(task: Task) -> bool:
    """Return True if the evaluation has its own text."""
    return task.evaluation.source is not None and task.evaluation.num_windows > 0


def read_text(evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase) -> EvaluationText:
    """Read the windows that ``evaluation`` requests, or fewer, from the start of its own ``source``.

    Documents are joined, each followed by the end-of-text token. Raises CalibrationError with the source's length.
    """
    text = evaluation.text
    assert text is not None
    tokenize, separator = tokenize_with(tokenizer), tokenizer.eos_token_id
    stride = evaluation.stride or evaluation.seq_len
    num_tokens = evaluation.seq_len + stride * (evaluation.num_windows - 1)
    stream = array("q")
    for document in read_documents(text, chat_renderer(tokenizer)):
        if document:
            stream.extend(tokenize(document))
            stream.extend(() if separator is None else (separator,))
        if len(stream) >= num_tokens:
            break
    if len(stream) < evaluation.seq_len:
        raise CalibrationError(
            f"The text '{evaluation.source}' has {len(stream)} tokens; a window is {evaluation.seq_len}.",
            code="not_enough_samples",
            hint="Lower the evaluation's seq_len, or give more text.",
            field="/evaluation/seq_len",
        )
    return of_stream(torch.tensor(stream[:num_tokens].tolist()), tokenizer, evaluation.seq_len, stride)
