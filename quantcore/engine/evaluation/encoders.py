"""Measures how far an encoder's outputs are from the original's: embeddings, or the scores of a reranker."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.model.kinds import Kind
from quantcore.engine.runtime.block_capture import NonBlockParts
from quantcore.report.quality import EncoderQuality, Measure


def compare_outputs(
    kind: Kind,
    text: EvaluationText,
    head: NonBlockParts,
    states: Sequence[torch.Tensor],
    original_head: NonBlockParts,
    original_states: Sequence[torch.Tensor],
) -> EncoderQuality:
    """Compare the outputs of a model of ``kind`` for every window with the original's.

    ``states`` are the last hidden states [1, T, H], which the heads turn into states of tokens or scores of a text.
    """
    with torch.inference_mode():
        ours = [head(state)[0].double().cpu() for state in states]
        theirs = [original_head(state)[0].double().cpu() for state in original_states]
    lost = sum(float((mine - other).square().sum()) for mine, other in zip(ours, theirs, strict=True))
    power = sum(float(other.square().sum()) for other in theirs)
    if kind is Kind.scores:
        cosine = None
        agreements = [_same_order(*pair) for pair in zip(torch.stack(ours).T, torch.stack(theirs).T, strict=True)]
    else:
        embeddings_NH, originals_NH = (torch.stack([states.mean(0) for states in both]) for both in (ours, theirs))
        cosine = _mean(functional.cosine_similarity(embeddings_NH, originals_NH).tolist())
        agreements = [_same_order(*pair) for pair in zip(_similar(embeddings_NH), _similar(originals_NH), strict=True)]
    return EncoderQuality(
        num_windows=len(text.ids_NT),
        seq_len=text.ids_NT.shape[1],
        cosine=cosine,
        rank_agreement=_mean([share for share in agreements if not math.isnan(share)]),
        output_error=math.sqrt(lost / power) if power > 0 else 0.0,
    )


def _similar(embeddings_NH: torch.Tensor) -> list[torch.Tensor]:
    """Return for each text the cosine similarities of its embedding to those of the others."""
    unit_NH = functional.normalize(embeddings_NH)
    cosines_NN = unit_NH @ unit_NH.T
    others = ~torch.eye(len(cosines_NN), dtype=torch.bool)
    return [row[mask] for row, mask in zip(cosines_NN, others, strict=True)]


def _same_order(ours_N: torch.Tensor, theirs_N: torch.Tensor) -> float:
    """Return the share of pairs of values that are in the same order in both; NaN without a pair."""
    pairs = torch.triu_indices(len(ours_N), len(ours_N), 1)
    signs = [(values[pairs[0]] - values[pairs[1]]).sign() for values in (ours_N, theirs_N)]
    return (signs[0] == signs[1]).double().mean().item()


def _mean(values: Sequence[float]) -> Measure:
    if not values:
        return Measure(value=None, stderr=None)
    numbers = torch.tensor(values, dtype=torch.float64)
    stderr = None if len(values) < 2 else (numbers.std() / math.sqrt(len(values))).item()
    return Measure(value=numbers.mean().item(), stderr=stderr)
