"""Generates samples with the original and the quantized model, in which people and gates recognize nonsense."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantcore.engine.data.tokenizer import begin_of_text, load_tokenizer
from quantcore.engine.data.windows import without_begin
from quantcore.engine.evaluation.generation import (
    Prompt,
    continue_prompts,
    end_tokens,
    in_template,
    longest_input,
    without_end,
)
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.errors import CalibrationError
from quantcore.events import Emit, Progress, Warned
from quantcore.report.quality import Sample

PROMPT_LEN = 24
NEW_TOKENS = 32
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "A train travels 180 km in two hours. How far does it travel in five hours at the same speed?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Erkläre in zwei Sätzen, wie ein Regenbogen entsteht.",
    "Explain in three sentences why the sky is blue.",
    "Rewrite this sentence in the past tense: She goes to the market and buys fresh bread.",
    "List three ways to save energy at home.",
    "Give a JSON object with the name, the country and the population of two large cities.",
)
"""The questions for chat models, in the order in which they are asked."""
MIN_REPEATED = 8
"""A shorter answer may end with one token twice: "10 + 10"."""


def find_prompts(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    text: EvaluationText,
    num: int,
    longest: int | None,
) -> list[Prompt]:
    """Return up to ``num`` prompts: questions for a chat model, then beginnings of windows of ``text``.

    ``arguments`` are those of the chat template. ``longest`` is the number of tokens that the model reads, answers
    included.
    """
    asked = _questions(tokenizer, arguments)
    if longest is not None:
        asked = [prompt for prompt in asked if len(prompt.ids) + NEW_TOKENS <= longest]
    prompts_NT = text.prompts(max(0, num - len(asked)), PROMPT_LEN)
    begin = begin_of_text(tokenizer)
    texts = [without_begin(ids, begin) for ids in prompts_NT.tolist()]
    return [*asked[:num], *(Prompt([*begin, *ids], str(tokenizer.decode(list(ids)))) for ids in texts)]


def compare_samples(
    folder: Path, arguments: Mapping[str, Any], text: EvaluationText, num: int, pair: ModelPair, emit: Emit
) -> tuple[Sample, ...]:
    """Continue ``num`` prompts with both models, one after the other: see ``find_prompts``. Warn if there are fewer.

    The tokenizer in ``folder`` is not in memory beside a model: one of 262,144 tokens takes 300 MB.
    """
    assert pair.original.stored is not None
    longest = longest_input(pair.original.streamed.model.config)
    tokenizer = load_tokenizer(folder)
    prompts = find_prompts(tokenizer, arguments, text, num, longest)
    ends = sorted(end_tokens(pair.original.stored, tokenizer))
    del tokenizer
    release_freed_memory()
    if len(prompts) < num:
        why = f"the evaluation has no more windows with a prompt of {PROMPT_LEN} tokens"
        emit(Warned("samples_left_out", f"There are {len(prompts)} samples instead of {num}: {why}."))
    if not prompts:
        return ()
    new_tokens = NEW_TOKENS if longest is None else min(NEW_TOKENS, longest - max(len(p.ids) for p in prompts))
    settings = {"prompts": [prompt.ids for prompt in prompts], "new_tokens": new_tokens, "ends": ends}
    emit(Progress("verify", 1, 2, "samples of model"))
    before = pair.baselines.value(settings, lambda: continue_prompts(pair.original, prompts, ends, new_tokens))
    emit(Progress("verify", 2, 2, "samples of model"))
    after = continue_prompts(pair.quantized, prompts, ends, new_tokens)
    before, after = ([without_end(answer, ends) for answer in answers] for answers in (before, after))
    release_freed_memory()
    tokenizer = load_tokenizer(folder)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")

    return tuple(
        Sample(
            prompt=prompt.text,
            original=decode(first),
            quantized=decode(second),
            original_is_degenerate=is_degenerate(first),
            quantized_is_degenerate=is_degenerate(second),
        )
        for prompt, first, second in zip(prompts, before, after, strict=True)
    )


def is_degenerate(ids: list[int]) -> bool:
    """Return True for an empty text, or a longer one whose second half repeats a single token."""
    return not ids or (len(ids) >= MIN_REPEATED and len(set(ids[len(ids) // 2 :])) == 1)


def _questions(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> list[Prompt]:
    """Return the questions as prompts; none if the tokenizer has no template that can ask them."""
    try:
        return [
            Prompt(in_template(tokenizer, arguments, [{"role": "user", "content": text}]), text) for text in QUESTIONS
        ]
    except CalibrationError:
        return []
