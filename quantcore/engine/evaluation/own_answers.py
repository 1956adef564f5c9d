"""Measures a quantized chat model on the original's own answers to packaged prompts, token by token.

People ask a chat model questions, and what it loses there is not what it loses on a text. The original answers each
prompt once (greedily); then both models predict the tokens of these answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from quantcore.config.task import MAX_OWN_PROMPTS, EvaluationConfig
from quantcore.data.prompts import ChatPrompt, PromptSet, read_prompt_set
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.tokenizer import load_tokenizer, tokenize_with
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.divergence import Measured, summarize_both, with_stderr
from quantcore.engine.evaluation.generation import Prompt, continue_prompts, end_tokens, longest_input
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.evaluation.text import EvaluationText, scoring
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.errors import CalibrationError, ConfigError
from quantcore.events import Emit, Progress
from quantcore.report.quality import AnswerQuality, KindQuality

ANSWER_LEN = 64
"""Most tokens of an answer. The first 50 lose more than the rest, so more answers say more than longer ones."""


def prompts_of(evaluation: EvaluationConfig) -> PromptSet:
    """Return the prompts whose answers are scored: all of the evaluation's own file, or some of the packaged ones."""
    return read_prompt_set(evaluation.prompts, MAX_OWN_PROMPTS if evaluation.prompts else evaluation.num_answers)


@dataclass(frozen=True)
class Question:
    """A question, and the prompt that a chat template makes of it; ``ending`` is the end of the prompt as text."""

    asked: ChatPrompt
    prompt: Prompt
    ending: str = ""

    @property
    def kind(self) -> str:
        return self.asked.kind


def find_questions(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    prompts: Sequence[ChatPrompt],
    longest: int | None,
    answer_len: int = ANSWER_LEN,
) -> tuple[list[Question], dict[str, str]]:
    """Return the prompts in the chat template, and the kinds left out, in part or at all, with reasons.

    ``arguments`` are those of the template, ``longest`` is the number of tokens that the model reads, answers of
    ``answer_len`` included. Nothing is returned for a tokenizer without a template.
    """
    if not tokenizer.chat_template:
        return [], {}
    render = chat_renderer(tokenizer, {**arguments, "add_generation_prompt": True})
    tokenize = tokenize_with(tokenizer)
    questions: list[Question] = []
    left_out: dict[str, str] = {}
    for asked in prompts:
        try:
            text = render(asked.messages, asked.tools)
            ids = tokenize(text)
        except CalibrationError as error:
            left_out.setdefault(asked.kind, error.message)
            continue
        if longest is not None and len(ids) + answer_len > longest:
            left_out.setdefault(asked.kind, f"a prompt of {len(ids)} tokens and its answer are too long for the model")
            continue
        questions.append(Question(asked, Prompt(ids, str(asked.messages[-1]["content"])), text.rstrip()[-40:]))
    return questions, left_out


@dataclass(frozen=True)
class Answers:
    """The original's answers to some prompts, as tokens.

    Models run on ``shown``, prompts and answers; ``scored`` has the answers alone, with the kind of each as its
    stratum. ``starts``: the number of tokens of each prompt. ``num_ended`` of the answers came to their end.
    ``prompts_sha256``: that of the file with the prompts, None for the packaged ones.
    """

    shown: EvaluationText
    scored: EvaluationText
    starts: tuple[int, ...]
    kinds: tuple[str, ...]
    num_ended: int
    left_out: Mapping[str, str]
    prompts_sha256: str | None = None

    def states(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states [1, P, H] that predict each answer, of those [1, T, H] of ``shown``."""
        length = self.scored.ids_NT.shape[1]
        return [_of_answer(state, start, length) for state, start in zip(states, self.starts, strict=True)]

    def quality(self, measured: Measured) -> AnswerQuality:
        quality = summarize_both(measured, self.scored)
        found = AnswerQuality(
            **{name: getattr(quality, name) for name in quality.model_fields_set},
            num_ended=self.num_ended,
            by_kind=tuple(_by_kind(measured, self.scored, self.kinds)),
            left_out=dict(self.left_out),
        )
        return found if self.prompts_sha256 is None else found.replace(prompts_sha256=self.prompts_sha256)


def answers_of(
    questions: Sequence[Question], answers: Sequence[list[int]], ends: Sequence[int], left_out: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
) -> Answers:  # fmt: skip
    """Return the tokens of ``answers``, the one that ends each of them included, as texts to score."""
    whole = _padded([[*question.prompt.ids, *answer] for question, answer in zip(questions, answers, strict=True)])
    shown = EvaluationText(whole.clamp(min=0), torch.ones(len(whole), dtype=torch.long), 0, 0)
    targets_NP = _padded(answers)
    kinds = tuple(dict.fromkeys(question.kind for question in questions))
    kind_N = torch.tensor([kinds.index(question.kind) for question in questions])
    text = EvaluationText(targets_NP.clamp(min=0), torch.zeros_like(kind_N), 0, 0, strata_N=kind_N)
    return Answers(
        shown,
        scoring(text, targets_NP, tokenizer),
        tuple(len(question.prompt.ids) for question in questions),
        kinds,
        sum(answer[-1] in ends for answer in answers),
        left_out,
    )


def answer_prompts(
    original: EvaluatedModel,
    baselines: BaselineCache,
    folder: Path,
    arguments: Mapping[str, Any],
    asked: PromptSet,
    emit: Emit,
) -> Answers | None:
    """Let the original answer prompts. None for a model without a chat template that takes packaged ones.

    Raises ConfigError ``no_answers`` for a file with prompts of which the template takes none.

    The tokenizer in ``folder`` is not in memory beside a model (see ``samples.compare_samples``).
    """
    assert original.stored is not None
    tokenizer = load_tokenizer(folder)
    questions, left_out = find_questions(
        tokenizer, arguments, asked.prompts, longest_input(original.streamed.model.config)
    )
    if not questions and asked.sha256 is not None:
        why = next(iter(left_out.values()), "its tokenizer has no chat template.")
        raise ConfigError(
            f"The model cannot be asked any of the {len(asked.prompts)} prompts: {why}",
            code="no_answers",
            hint="Use a chat model, or other prompts.",
        )
    if not questions:
        return None
    ends = sorted(end_tokens(original.stored, tokenizer))
    del tokenizer
    release_freed_memory()
    emit(Progress("verify", 1, 2, "answers of the original"))
    prompts = [question.prompt for question in questions]
    settings = {"prompts": [prompt.ids for prompt in prompts], "new_tokens": ANSWER_LEN, "ends": ends}
    answers = baselines.value(settings, lambda: continue_prompts(original, prompts, ends, ANSWER_LEN))
    return replace(answers_of(questions, answers, ends, left_out, load_tokenizer(folder)), prompts_sha256=asked.sha256)


def compare_own_answers(
    folder: Path, arguments: Mapping[str, Any], asked: PromptSet, pair: ModelPair, emit: Emit
) -> AnswerQuality | None:
    """Return the distance of both models on the original's answers to the prompts ``asked``.

    None for a model without a chat template that takes them; if ranks share the models, for all ranks but the first.
    """
    answers = answer_prompts(pair.original, pair.baselines, folder, arguments, asked, emit)
    if answers is None or not pair.baselines.ranks.is_first:
        return None
    emit(Progress("verify", 2, 2, "answers of the original"))
    return score_answers(answers, pair, emit)


def score_answers(answers: Answers, pair: ModelPair, emit: Emit) -> AnswerQuality:
    """Return the distance of both models on the tokens of ``answers``."""
    before, after = (answers.states(states) for states in pair.states(answers.shown, emit))
    return answers.quality(pair.measure(answers.scored, after, before))


def _by_kind(measured: Measured, text: EvaluationText, kinds: Sequence[str]) -> Iterator[KindQuality]:
    assert measured.distances_NP4 is not None and text.strata_N is not None
    for number, kind in enumerate(kinds):
        of_kind_N = text.strata_N == number
        kl_NP, agrees_NP = measured.distances_NP4[of_kind_N][..., :2].unbind(-1)
        scored_NP, alone = text.scored_NP[of_kind_N], replace(text, strata_N=None)
        yield KindQuality(
            kind=kind,
            num_answers=len(scored_NP),
            num_tokens=int(scored_NP.sum()),
            kl_mean=with_stderr(kl_NP, scored_NP, alone),
            top1_agreement=with_stderr(agrees_NP, scored_NP, alone),
        )


def _of_answer(state_1TH: torch.Tensor, prompt_len: int, length: int) -> torch.Tensor:
    """Return the states [1, length, H] that predict an answer behind a prompt, zeros behind the window's end."""
    part = state_1TH[:, prompt_len - 1 : prompt_len - 1 + length]
    return functional.pad(part, (0, 0, 0, length - part.shape[1]))


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return rows of token ids as one tensor [N, T], -1 behind the end of each."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows])
