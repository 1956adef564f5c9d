"""References: what an original predicts, in a file, so that results are measured later, elsewhere, without it.

A reference holds tokens (a text, and for a chat model its own answers) and the original's most likely predictions of
each. All other tokens together are represented by some of them, drawn by the original's probabilities: what they add
to the divergence is an expectation over these probabilities, of which a systematic sample (Cochran, Sampling
Techniques, 8) is an unbiased estimate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.artifact import written_whole
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.divergence import Measured, sums_of
from quantcore.engine.evaluation.own_answers import Answers
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.runtime.vocabulary import Vocabulary
from quantcore.errors import ConfigError, reason_of

FORMAT = 1
NUM_TOP = 128
"""Predictions kept of each token: 1 KB."""
NUM_DRAWN = 32
"""Other tokens drawn for each token."""
TEXT, ANSWERS = "text", "answers"
METADATA = "bitfoundry_reference"


@dataclass(frozen=True)
class Predictions:
    """What an original predicts for each of the S scored tokens of a text.

    ``losses_S`` are the losses (nats) of the tokens themselves, ``top_SK`` its most likely ones, the first one first,
    and ``top_log_SK`` the logarithms of their probabilities. ``drawn_SD`` are others, drawn by their probabilities, -1
    where there is none, and ``drawn_log_SD`` the logarithms of these.
    """

    losses_S: torch.Tensor
    top_SK: torch.Tensor
    top_log_SK: torch.Tensor
    drawn_SD: torch.Tensor
    drawn_log_SD: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """A reference in memory. ``about``: the original (``model``, ``identity``) and where it was computed.

    ``spelled`` is a digest of all tokens as text: another tokenizer would spell them otherwise.
    """

    about: Mapping[str, Any]
    spelled: str
    text: EvaluationText
    of_text: Predictions
    answers: Answers | None = None
    of_answers: Predictions | None = None


def write(reference: Reference, path: Path) -> None:
    """Write a reference as a safetensors file, whole or not at all."""
    tensors = _tensors_of(TEXT, reference.text, reference.text, reference.of_text)
    about = {**reference.about, "format": FORMAT, "spelled": reference.spelled, "counts": _counts(reference.text)}
    if reference.answers is not None and reference.of_answers is not None:
        answers = reference.answers
        tensors |= _tensors_of(ANSWERS, answers.shown, answers.scored, reference.of_answers)
        tensors[f"{ANSWERS}.starts"] = torch.tensor(answers.starts, dtype=torch.int32)
        about["answers"] = {
            "kinds": answers.kinds, "num_ended": answers.num_ended, "left_out": dict(answers.left_out),
            "counts": _counts(answers.scored), "prompts_sha256": answers.prompts_sha256,
        }  # fmt: skip
    with written_whole(path) as scratch:
        save_file(tensors, scratch, metadata={METADATA: json.dumps(about)})


def read(path: Path) -> Reference:
    """Read a reference. Raises ConfigError ``invalid_reference``."""
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get(METADATA, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        if about is None or about["format"] != FORMAT:
            raise _invalid(path, f"it is not of format {FORMAT}")
        text, of_text = _part_of(TEXT, tensors, about["counts"], tensors[f"{TEXT}.ids"])
        answers = of_answers = None
        if (said := about.get("answers")) is not None:
            ids_NT, targets_NP = (tensors[f"{ANSWERS}.{each}"].long() for each in ("ids", "targets"))
            scored, of_answers = _part_of(ANSWERS, tensors, said["counts"], targets_NP.clamp(min=0))
            whole = EvaluationText(ids_NT, torch.ones(len(ids_NT), dtype=torch.long), 0, 0)
            starts = tuple(tensors[f"{ANSWERS}.starts"].tolist())
            answers = Answers(
                whole, scored, starts, tuple(said["kinds"]), said["num_ended"], said["left_out"],
                said.get("prompts_sha256"),
            )  # fmt: skip
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _invalid(path, reason_of(error)) from error
    return Reference(about, about["spelled"], text, of_text, answers, of_answers)


def spelling(text: EvaluationText, answers: Answers | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the text that ``tokenizer`` makes of the tokens."""
    rows = [*text.ids_NT.tolist(), *([] if answers is None else answers.shown.ids_NT.tolist())]
    spelled = json.dumps(tokenizer.batch_decode(rows))
    return hashlib.sha256(spelled.encode()).hexdigest()


def check_fits(reference: Reference, folder: Path) -> None:
    """Raise ConfigError ``other_tokenizer`` unless the tokenizer in ``folder`` is the original's."""
    if spelling(reference.text, reference.answers, load_tokenizer(folder)) != reference.spelled:
        raise ConfigError(
            f"The reference is one of {reference.about['model']}, whose tokenizer is another than this model's.",
            code="other_tokenizer",
            hint="Use the reference of the model that this one was made from.",
        )


def _invalid(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a reference: {why}.",
        code="invalid_reference",
        hint="Make one with `bitfoundry reference MODEL -o FILE`.",
    )


def _counts(text: EvaluationText) -> list[int]:
    return [text.num_words, text.num_bytes]


def _tensors_of(
    name: str, shown: EvaluationText, scored: EvaluationText, predictions: Predictions
) -> dict[str, torch.Tensor]:
    targets_NP = torch.where(scored.scored_NP, scored.predicted_NP, -1)
    tensors = {
        "ids": shown.ids_NT.int(), "targets": targets_NP.int(), "losses": predictions.losses_S.float(),
        "top": predictions.top_SK, "top_log": predictions.top_log_SK,
        "drawn": predictions.drawn_SD, "drawn_log": predictions.drawn_log_SD,
    }  # fmt: skip
    if scored.strata_N is not None:
        tensors["strata"] = scored.strata_N.int()
    return {f"{name}.{each}": tensor.contiguous() for each, tensor in tensors.items()}


def _part_of(
    name: str, tensors: Mapping[str, torch.Tensor], counts: Sequence[int], ids_NT: torch.Tensor
) -> tuple[EvaluationText, Predictions]:
    """Return a text that is scored, and what was predicted of it. Raises ValueError, KeyError."""
    targets_NP, strata_N = tensors[f"{name}.targets"].long(), tensors.get(f"{name}.strata")
    num_scored, (num_words, num_bytes) = int((targets_NP >= 0).sum()), map(int, counts)
    stored = [tensors[f"{name}.{each}"] for each in ("losses", "top", "top_log", "drawn", "drawn_log")]
    if any((tensors[each] < 0).any() for each in (f"{name}.ids", f"{name}.top")):
        raise ValueError("it has tokens below 0")
    if any(len(tensor) != num_scored for tensor in stored):
        raise ValueError(f"it has {len(stored[0])} predictions for {num_scored} tokens")
    text = EvaluationText(
        ids_NT.long(),
        torch.zeros(len(ids_NT), dtype=torch.long),
        num_words,
        num_bytes,
        targets_NP,
        strata_N=None if strata_N is None else strata_N.long(),
    )
    return text, Predictions(*stored)


def predictions_of(vocabulary: Vocabulary, states: Sequence[torch.Tensor], text: EvaluationText) -> Predictions:
    """Return what a model predicts from its last hidden states [1, T, H]."""
    top: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(window: int, rows: slice, logits: torch.Tensor, first: int) -> None:
        values, ids = logits.float().topk(min(NUM_TOP, logits.shape[1]))
        place, ids = (window, rows.start), ids + first
        if place in top:
            values, ids = torch.cat([top[place][0], values], 1), torch.cat([top[place][1], ids], 1)
        by_id = ids.argsort(dim=1)  # of two equal logits the first token is the choice
        values, ids = values.gather(1, by_id), ids.gather(1, by_id)
        best = values.sort(dim=1, descending=True, stable=True).indices[:, :NUM_TOP]
        top[place] = values.gather(1, best).cpu(), ids.gather(1, best).cpu()

    (sums,) = sums_of((vocabulary, states), [], text, keep)
    log_total_M = torch.cat([each.models[0].log_total for each in sums])
    values, ids = (torch.cat(parts) for parts in zip(*(top[place] for place in sorted(top)), strict=True))
    losses_M = torch.cat([each.losses()[0] for each in sums])
    log_MK = values.double() - log_total_M[:, None]
    drawn, drawn_log = _draw(vocabulary, states, text, ids, log_MK, log_total_M)
    scored = text.scored_NP.flatten()
    return Predictions(
        losses_M[scored], ids[scored].int(), log_MK[scored].float(), drawn[scored].int(), drawn_log[scored].float()
    )


def _draw(
    vocabulary: Vocabulary, states: Sequence[torch.Tensor], text: EvaluationText, top_MK: torch.Tensor,
    top_log_MK: torch.Tensor, log_total_M: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Draw NUM_DRAWN of the tokens that are not listed, by their probabilities: ids (-1: none) and logarithms [M, D].

    The draws of a token are equally spaced over the probability of all these tokens, from a random start.
    """
    num_outputs = text.scored_NP.shape[1]
    rest_M = (1 - top_log_MK.exp().sum(1)).clamp(min=0)
    starts_M = torch.rand(len(rest_M), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points_MD = (torch.arange(NUM_DRAWN) + starts_M[:, None]) / NUM_DRAWN * rest_M[:, None]
    drawn_MD = torch.full(points_MD.shape, -1)
    drawn_log_MD = torch.zeros(points_MD.shape, dtype=torch.float64)
    passed_M = torch.zeros_like(rest_M)

    def draw(window: int, rows: slice, logits: torch.Tensor, first: int) -> None:
        own = slice(window * num_outputs + rows.start, window * num_outputs + rows.start + len(logits))
        logs = logits.double().cpu() - log_total_M[own, None]
        listed = top_MK[own] - first
        is_here = (listed >= 0) & (listed < logs.shape[1])
        probabilities = logs.exp()
        keep = torch.ones_like(logs).scatter_reduce_(
            1, listed.clamp(0, logs.shape[1] - 1), torch.where(is_here, 0.0, 1.0).double(), "amin"
        )
        ends = (probabilities * keep).cumsum(1) + passed_M[own, None]
        places = torch.searchsorted(ends, points_MD[own].contiguous(), right=True)
        is_drawn = (points_MD[own] >= passed_M[own, None]) & (places < logs.shape[1])
        places = places.clamp(max=logs.shape[1] - 1)
        drawn_MD[own] = torch.where(is_drawn, places + first, drawn_MD[own])
        drawn_log_MD[own] = torch.where(is_drawn, logs.gather(1, places), drawn_log_MD[own])
        passed_M[own] = ends[:, -1]

    sums_of((vocabulary, states), [], text, draw)
    return drawn_MD, drawn_log_MD


def measure_against(
    predictions: Predictions, vocabulary: Vocabulary, states: Sequence[torch.Tensor], text: EvaluationText
) -> Measured:
    """Measure losses and distances of a model from an original's predictions of ``text``.

    The distances are those of ``TokenSums.distances``. A reference has no logits, so the last two are 0.
    """
    shape, scored_NP = text.scored_NP.shape, text.scored_NP
    ids_SX = torch.cat([predictions.top_SK, predictions.drawn_SD], 1).long()
    ids_NPX = torch.full((*shape, ids_SX.shape[1]), -1)
    ids_NPX[scored_NP] = ids_SX
    found_NPX = torch.zeros(ids_NPX.shape, dtype=torch.float64)

    def pick(window: int, rows: slice, logits: torch.Tensor, first: int) -> None:
        places = ids_NPX[window, rows] - first
        is_here = (places >= 0) & (places < logits.shape[1])
        values = logits.float().gather(1, places.clamp(0, logits.shape[1] - 1).to(logits.device)).double().cpu()
        found_NPX[window, rows] += torch.where(is_here, values, 0.0)

    (sums,) = sums_of((vocabulary, states), [], text, pick)
    losses_NP = torch.cat([each.losses()[0] for each in sums]).view(shape)
    log_total_NP = torch.cat([each.models[0].log_total for each in sums]).view(shape)
    choice_NP = torch.cat([each.models[0].choice for each in sums]).view(shape)
    original_losses_NP, kl_NP = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
    original_losses_NP[scored_NP] = predictions.losses_S
    kl_NP[scored_NP] = _divergence(predictions, (found_NPX - log_total_NP[..., None])[scored_NP])
    agrees_NP = (choice_NP == ids_NPX[..., 0]).double()
    nothing = torch.zeros_like(kl_NP)
    return Measured(losses_NP, original_losses_NP, torch.stack([kl_NP, agrees_NP, nothing, nothing], -1))


def _divergence(predictions: Predictions, log_q_SX: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) in nats [S]: the sum over the listed tokens, and the estimate of what the others add."""
    num_top = predictions.top_SK.shape[1]
    log_p, p = predictions.top_log_SK.double(), predictions.top_log_SK.double().exp()
    listed_S = torch.where(p > 0, p * (log_p - log_q_SX[:, :num_top]), 0.0).sum(1)
    is_drawn = predictions.drawn_SD >= 0
    changes_SD = torch.where(is_drawn, predictions.drawn_log_SD.double() - log_q_SX[:, num_top:], 0.0)
    rest_S = (1 - p.sum(1)).clamp(min=0)
    return listed_S + rest_S * changes_SD.sum(1) / is_drawn.sum(1).clamp(min=1)
