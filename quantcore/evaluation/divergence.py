"""Measures how far a model's predictions are from the original's, token by token on the same text.

Perplexity can stay the same while answers change ("Accuracy is Not All You Need", arXiv:2407.09141). The divergence of
the two distributions and the agreement of their first choices say more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from quantcore.evaluation.perplexity import (
    Logits,
    exponential,
    mean_and_stderr,
    perplexities,
    rows_at_a_time,
    tiles_of,
    token_losses,
)
from quantcore.evaluation.quality import AbsoluteQuality, Divergence, Measure, PositionQuality, Quality
from quantcore.evaluation.text import EvaluationText

POSITIONS = (16, 64, 256, 1024, 4096, 16384, 65536)
"""Last positions of the ranges for which the distance is also given: each is about four times as long as the last."""


@dataclass(frozen=True)
class Measured:
    """Losses of the predicted tokens, [N, P]; with an original also its losses and the distances."""

    losses_NP: torch.Tensor
    original_losses_NP: torch.Tensor | None = None
    distances_NP4: torch.Tensor | None = None


def measure(
    logits: Logits, states: Sequence[torch.Tensor], text: EvaluationText,
    original: tuple[Logits, Sequence[torch.Tensor]] | None = None,
) -> Measured:  # fmt: skip
    """Measure losses and distances window by window, some rows at a time.

    ``states`` are the last hidden states [1, T, H]; ``original`` has logits and states of the float model.
    """
    losses, compared = [], []
    with torch.inference_mode():
        for window, predicted_P in enumerate(text.predicted_NP):
            for rows in rows_at_a_time(len(predicted_P)):
                targets_T = predicted_P[rows]
                logits_TV = logits(states[window][:, rows])[0]
                if original is None:
                    losses.append(token_losses(logits_TV, targets_T))
                else:
                    original_TV = original[0](original[1][window][:, rows])[0]
                    compared.append(compare(original_TV, logits_TV, targets_T))
    shape = (len(text.ids_NT), -1)
    if original is None:
        return Measured(torch.cat(losses).view(shape))
    original_losses_N, losses_N, distances_N4 = (torch.cat(parts) for parts in zip(*compared, strict=True))
    return Measured(losses_N.view(shape), original_losses_N.view(shape), distances_N4.view(*shape, 4))


def compare(
    original_TV: torch.Tensor, logits_TV: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the original's losses of the ``targets_T``, the other's [T], and the distances [T, 4], on the CPU.

    The distances, in float64, are KL(original || other) in nats, 1 for the same first choice, the sum of squared
    differences of the logits, and the sum of squares of the original's logits. Both sums are without the mean over the
    vocabulary, on which no probability depends.
    """
    tiles, targets_T1 = [], targets_T.to(logits_TV.device)[:, None]
    for rows in tiles_of(original_TV):
        ours, theirs = original_TV[rows].float(), logits_TV[rows].float()
        log_p, log_q = functional.log_softmax(ours, -1), functional.log_softmax(theirs, -1)
        losses = [-logs.gather(1, targets_T1[rows])[:, 0].cpu() for logs in (log_p, log_q)]
        torch.sub(log_p, log_q, out=log_q)  # in place, because new memory costs more than these sums
        kl_T = log_p.exp_().mul_(log_q).sum(-1).clamp(min=0)
        agrees_T = ours.max(-1).indices == theirs.max(-1).indices  # argmax takes three times as long
        centred = torch.sub(ours, ours.mean(-1, keepdim=True), out=log_p)
        lost = torch.sub(theirs, theirs.mean(-1, keepdim=True), out=log_q).sub_(centred)
        lost_T, power_T = (values.square_().sum(-1) for values in (lost, centred))
        distances_T4 = torch.stack([kl_T, agrees_T.float(), lost_T, power_T], -1).double().cpu()
        tiles.append((*losses, distances_T4))
    original_losses_T, losses_T, distances_T4 = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return original_losses_T, losses_T, distances_T4


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
            kl_mean=_with_stderr(kl_NP, scored, text),
            kl_p99=kl_NP[scored].kthvalue(math.ceil(0.99 * int(scored.sum()))).values.item(),
            top1_agreement=_with_stderr(agrees_NP, scored, text),
            logit_error=(lost / power).sqrt().item() if power > 0 else 0.0,
        ),
        by_position=tuple(_by_position(kl_NP, agrees_NP, text)),
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
                first=first, last=last, num_tokens=num_tokens, kl_mean=_with_stderr(kl_NP, range_NP, text),
                top1_agreement=_with_stderr(agrees_NP, range_NP, text),
            )  # fmt: skip


def _with_stderr(values_NP: torch.Tensor, counts_NP: torch.Tensor, text: EvaluationText) -> Measure:
    mean, stderr = mean_and_stderr(values_NP, counts_NP, text.strata_N)
    return Measure(value=mean, stderr=stderr)
