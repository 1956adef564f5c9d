"""Measures how far a model's predictions are from the original's, token by token on the same text.

Perplexity can stay the same while answers change ("Accuracy is Not All You Need", arXiv:2407.09141). The divergence of
the two distributions and the agreement of their first choices say more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from quantcore.engine.evaluation.perplexity import exponential, mean_and_stderr, perplexities, sums_of_windows
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.evaluation.token_sums import TokenSums, sums_of_tokens
from quantcore.engine.runtime.block_capture import NonBlockParts
from quantcore.engine.runtime.vocabulary import Vocabulary, common_parts
from quantcore.plan.workload import LOGIT_ROWS, PART_ROWS
from quantcore.report.quality import AbsoluteQuality, Divergence, Measure, PositionQuality, Quality, WindowSums

POSITIONS = (16, 64, 256, 1024, 4096, 16384, 65536)
"""Last positions of the ranges for which the distance is also given: each is about four times as long as the last."""
MAX_WINDOWS = 1024
"""Most windows whose sums are kept in a report, where they take about 60 bytes each."""


@dataclass(frozen=True)
class Measured:
    """Losses of the predicted tokens, [N, P]; with an original also its losses and the distances."""

    losses_NP: torch.Tensor
    original_losses_NP: torch.Tensor | None = None
    distances_NP4: torch.Tensor | None = None


def measure(
    vocabulary: Vocabulary,
    states: Sequence[torch.Tensor],
    text: EvaluationText,
    original: tuple[Vocabulary, Sequence[torch.Tensor]] | None = None,
) -> Measured:
    """Measure losses and distances, for a part of the vocabulary after the other, and for some rows of a window.

    ``states`` are the last hidden states [1, T, H]; ``original`` has vocabulary and states of the float model.
    """
    if original is None:
        return _measured(sums_of((vocabulary, states), [], text)[0], text)
    return measure_each([(vocabulary, states)], original, text)[0]


def measure_each(others: Sequence[Predicting], original: Predicting, text: EvaluationText) -> list[Measured]:
    """Measure the losses of ``others`` and their distances from the ``original``, whose logits are computed once."""
    return [_measured(found, text) for found in sums_of(original, others, text)]


def _measured(found: Sequence[TokenSums], text: EvaluationText) -> Measured:
    shape = len(text.ids_NT), -1
    *of_original, losses_NP = (
        torch.cat(parts).view(shape) for parts in zip(*(each.losses() for each in found), strict=True)
    )
    if not of_original:
        return Measured(losses_NP)
    return Measured(losses_NP, of_original[0], torch.cat([each.distances() for each in found]).view(*shape, 4))


Predicting = tuple[Vocabulary, Sequence[torch.Tensor]]
"""A model's vocabulary, and its last hidden states [1, T, H] of each window."""


class Seen(Protocol):
    """Gets the logits [R, v] of the first model for the tokens from ``first`` on, of ``rows`` of a window."""

    def __call__(self, window: int, rows: slice, logits: torch.Tensor, first: int) -> None: ...


def sums_of(
    first: Predicting, others: Sequence[Predicting], text: EvaluationText, see: Seen | None = None
) -> list[list[TokenSums]]:
    """Return the sums of ``first`` and each of the ``others``, for some rows of each window after the other.

    Without others they are those of ``first`` alone. ``see`` is shown all its logits, a part of the vocabulary at a
    time.
    """
    groups: list[list[Predicting]] = [[first, other] for other in others] or [[first]]
    sums: list[dict[tuple[int, int], TokenSums]] = [{} for _ in groups]
    vocabularies = {id(vocabulary): vocabulary for vocabulary, _ in (first, *others)}
    with torch.inference_mode():
        for tokens in common_parts(*vocabularies.values()):
            start, size = (tokens.start, PART_ROWS) if tokens else (0, LOGIT_ROWS)
            with ExitStack() as parts:
                heads = {key: parts.enter_context(each.part(tokens)) for key, each in vocabularies.items()}
                for window, rows in _places(text, size):
                    of_first = _logits(heads, first, window, rows)
                    if see is not None:
                        see(window, rows, of_first, start)
                    targets = text.predicted_NP[window][rows]
                    for (_, *other), found in zip(groups, sums, strict=True):
                        outputs = [of_first, *(_logits(heads, each, window, rows) for each in other)]
                        added = sums_of_tokens(outputs, targets, start)
                        before = found.get((window, rows.start))
                        found[window, rows.start] = added if before is None else before.joined(added)
    return [[found[place] for place in sorted(found)] for found in sums]


def _places(text: EvaluationText, size: int) -> Iterator[tuple[int, slice]]:
    """Yield each window with ``size`` of its rows after the other."""
    for window, predicted_P in enumerate(text.predicted_NP):
        for start in range(0, len(predicted_P), size):
            yield window, slice(start, min(start + size, len(predicted_P)))


def _logits(heads: Mapping[int, NonBlockParts], model: Predicting, window: int, rows: slice) -> torch.Tensor:
    vocabulary, states = model
    return heads[id(vocabulary)](states[window][:, rows])[0]


def summarize(measured: Measured, text: EvaluationText) -> AbsoluteQuality:
    """Summarize the losses of one model. Raises NumericsError if they are not finite."""
    return AbsoluteQuality(
        num_windows=len(text.ids_NT),
        seq_len=text.ids_NT.shape[1],
        num_tokens=int(text.scored_NP.sum()),
        after=perplexities(measured.losses_NP, text),
    )


def summarize_both(measured: Measured, text: EvaluationText) -> Quality:
    """Summarize the losses of both models and their distances. Raises NumericsError if losses are not finite."""
    assert measured.original_losses_NP is not None and measured.distances_NP4 is not None
    alone, scored = summarize(measured, text), text.scored_NP
    kl_NP, agrees_NP, lost_NP, power_NP = measured.distances_NP4.unbind(-1)
    lost, power = lost_NP[scored].sum(), power_NP[scored].sum()
    return Quality(
        num_windows=alone.num_windows,
        seq_len=alone.seq_len,
        num_tokens=alone.num_tokens,
        after=alone.after,
        before=perplexities(measured.original_losses_NP, text),
        ratio=exponential(*mean_and_stderr(measured.losses_NP - measured.original_losses_NP, scored, text.strata_N)),
        divergence=Divergence(
            kl_mean=with_stderr(kl_NP, scored, text),
            kl_p99=kl_NP[scored].kthvalue(math.ceil(0.99 * int(scored.sum()))).values.item(),
            top1_agreement=with_stderr(agrees_NP, scored, text),
            logit_error=(lost / power).sqrt().item() if power > 0 else None,
        ),
        by_position=tuple(_by_position(kl_NP, agrees_NP, text)),
        by_window=window_sums(measured, scored, text.strata_N) if alone.num_windows <= MAX_WINDOWS else None,
    )


def window_sums(measured: Measured, scored_NP: torch.Tensor, strata_N: torch.Tensor | None = None) -> WindowSums:
    """Return what a paired comparison needs of a result: sums over the scored tokens of each window."""
    assert measured.distances_NP4 is not None
    kl_NP, agrees_NP, *_ = measured.distances_NP4.unbind(-1)
    sums = (sums_of_windows(values_NP, scored_NP).tolist() for values_NP in (measured.losses_NP, kl_NP, agrees_NP))
    losses, kl, agreements = map(tuple, sums)
    return WindowSums(
        num_tokens=tuple(scored_NP.sum(1).tolist()),
        losses=losses,
        kl=kl,
        top1_agreements=agreements,
        texts=() if strata_N is None else tuple(strata_N.tolist()),
    )


def _by_position(kl_NP: torch.Tensor, agrees_NP: torch.Tensor, text: EvaluationText) -> Iterator[PositionQuality]:
    """Yield the distance in each range of POSITIONS in which tokens are scored."""
    num_positions = text.scored_NP.shape[1]
    lasts = [*(last for last in POSITIONS if last < num_positions), num_positions]
    for first, last in zip([1, *(last + 1 for last in lasts)], lasts, strict=False):
        range_NP = text.scored_NP.clone()
        range_NP[:, : first - 1] = False
        range_NP[:, last:] = False
        if num_tokens := int(range_NP.sum()):
            yield PositionQuality(
                first=first,
                last=last,
                num_tokens=num_tokens,
                kl_mean=with_stderr(kl_NP, range_NP, text),
                top1_agreement=with_stderr(agrees_NP, range_NP, text),
            )


def with_stderr(values_NP: torch.Tensor, counts_NP: torch.Tensor, text: EvaluationText) -> Measure:
    """Return the mean of the values that count, and its standard error."""
    mean, stderr = mean_and_stderr(values_NP, counts_NP, text.strata_N)
    return Measure(value=mean, stderr=stderr)
