"""Perplexity on token windows: exp of the mean negative log-likelihood of every token after a window's first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from quantcore.errors import NumericsError
from quantcore.runtime.ranks import ALONE, Ranks

CHUNK = 128  # rows of logits that are in float32 at one time


def negative_log_likelihood(logits_TV: torch.Tensor, ids_T: torch.Tensor) -> float:
    """Sum over t of -log p(ids[t + 1] | ids[: t + 1]), natural log, in float32 whatever the logits are."""
    targets = ids_T[1:].to(logits_TV.device)
    total = 0.0
    for start in range(0, len(targets), CHUNK):
        rows = slice(start, min(start + CHUNK, len(targets)))
        total += functional.cross_entropy(logits_TV[:-1][rows].float(), targets[rows], reduction="sum").item()
    return total


def perplexity(
    logits: Callable[[torch.Tensor], torch.Tensor], states: Sequence[torch.Tensor], windows_NT: torch.Tensor,
    ranks: Ranks = ALONE,
) -> float:  # fmt: skip
    """Perplexity of N windows. NumericsError if it is not finite.

    The last hidden states [1, T, H] are given of those that are this rank's (``Ranks.part``).
    """
    mine = windows_NT[ranks.part(len(windows_NT)).start :][: len(states)]
    losses = [negative_log_likelihood(logits(state)[0], ids) for state, ids in zip(states, mine, strict=True)]
    total = sum(loss for part in ranks.gather(losses) for loss in part)
    mean = total / (windows_NT.shape[0] * (windows_NT.shape[1] - 1))
    if not math.isfinite(mean) or mean > 700:
        raise NumericsError(
            "The model's logits are not finite on the held-out text.",
            code="nonfinite_logits",
            hint="The float model overflows, or the quantized one is broken: see the layer errors in the report.",
        )
    return math.exp(mean)
