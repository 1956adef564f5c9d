"""Generates samples with the original and the quantized model, in which people and gates recognize nonsense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.streamers import BaseStreamer

from quantcore.checkpoint.headers import read_json
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.tokenizer import begin_of_text, load_tokenizer, tokenize_with
from quantcore.engine.data.windows import without_begin
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.runtime.devices import release_freed_memory
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.errors import CalibrationError
from quantcore.events import Emit, Progress, Warned
from quantcore.importing.model import Model
from quantcore.report.quality import Sample

Message = dict[str, str]

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


@dataclass(frozen=True)
class Prompt:
    """A prompt: its tokens, and the text that is shown for it."""

    ids: list[int]
    text: str


def find_prompts(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], text: EvaluationText, num: int,
    longest: int | None,
) -> list[Prompt]:  # fmt: skip
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
    folder: Path, arguments: Mapping[str, Any], text: EvaluationText, num: int,
    original: EvaluatedModel, quantized: EvaluatedModel, baselines: BaselineCache, emit: Emit,
) -> tuple[Sample, ...]:  # fmt: skip
    """Continue ``num`` prompts with both models, one after the other: see ``find_prompts``. Warn if there are fewer.

    The tokenizer in ``folder`` is not in memory beside a model: one of 262,144 tokens takes 300 MB.
    """
    assert original.stored is not None
    longest = longest_input(original.streamed.model.config)
    tokenizer = load_tokenizer(folder)
    prompts = find_prompts(tokenizer, arguments, text, num, longest)
    ends = sorted(end_tokens(original.stored, tokenizer))
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
    before = baselines.value(settings, lambda: continue_prompts(original, prompts, ends, new_tokens))
    emit(Progress("verify", 2, 2, "samples of model"))
    after = continue_prompts(quantized, prompts, ends, new_tokens)
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


def continue_prompts(
    model: EvaluatedModel, prompts: Sequence[Prompt], ends: Sequence[int], new_tokens: int
) -> list[list[int]]:
    """Return the most likely tokens after each prompt: ``new_tokens``, or fewer where one of ``ends`` comes.

    Prompts are filled up on the left to the same length, and the model does not attend to what fills them. A model with
    a recurrent state would read it all the same, so it continues one prompt at a time.
    """
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=list(ends) or None, pad_token_id=ends[0] if ends else 0
    )
    answers: list[list[int]] = []
    with model.whole() as whole, torch.inference_mode():
        size = 1 if whole._is_stateful else len(prompts)
        for start in range(0, len(prompts), size):
            answers += _answers(whole, [prompt.ids for prompt in prompts[start : start + size]], settings)
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in answers]


def _answers(model: PreTrainedModel, prompts: Sequence[list[int]], settings: GenerationConfig) -> list[list[int]]:
    """Return the new tokens after each of some ``prompts``; those behind the end of an answer fill it up."""
    length = max(map(len, prompts))
    ids_NT = torch.tensor([[settings.pad_token_id] * (length - len(ids)) + ids for ids in prompts])
    mask_NT = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
    rows: list[list[int]] = generate(model, ids_NT, settings, mask_NT=mask_NT)[:, length:].tolist()
    return rows


def generate(
    model: PreTrainedModel, ids_NT: torch.Tensor, settings: GenerationConfig, streamer: BaseStreamer | None = None,
    mask_NT: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the prompts with their continuations, [N, T + at most max_new_tokens].

    ``streamer`` is given each token of a single prompt's continuation as soon as it is known. ``mask_NT`` is 0 where a
    prompt was filled up.
    """
    ids_NT = ids_NT.to(model.device)
    mask_NT = torch.ones_like(ids_NT) if mask_NT is None else mask_NT.to(model.device)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hook = head.register_forward_pre_hook(_contiguous) if isinstance(head, nn.Module) else nullcontext()
    with hook, matmul_precision(model.device, dtypes):  # in tiles: otherwise the whole head is held in float32, twice
        ids: torch.Tensor = model.generate(  # type: ignore[operator]
            ids_NT, attention_mask=mask_NT, generation_config=settings, streamer=streamer
        )
    return ids


def _contiguous(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a head without gaps between them.

    Transformers gives it a slice, the last place of each prompt. Of a slice torch makes one product for each prompt,
    with a copy of the head for each: 2.7 GB for eight prompts and 262,144 tokens of 640 values in bfloat16.
    """
    return tuple(values.contiguous() for values in inputs)


def is_degenerate(ids: list[int]) -> bool:
    """Return True for an empty text, or a longer one whose second half repeats a single token."""
    return not ids or (len(ids) >= MIN_REPEATED and len(set(ids[len(ids) // 2 :])) == 1)


def end_tokens(model: Model, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer, from config.json, generation_config.json and the tokenizer."""
    config, generation = model.headers.config, model.folder / "generation_config.json"
    text_config = config.get("text_config")
    found = _numbers(config.get("eos_token_id")) | _numbers(tokenizer.eos_token_id)
    if isinstance(text_config, dict):
        found |= _numbers(text_config.get("eos_token_id"))
    if generation.is_file():
        found |= _numbers(read_json(generation, "no_generation_config").get("eos_token_id"))
    return found


def _numbers(given: object) -> frozenset[int]:
    values = given if isinstance(given, list | tuple) else [given]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))


def in_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: list[Message]) -> list[int]:
    """Return the tokens of a chat, up to where an answer begins. Raises CalibrationError as ``chat_renderer``."""
    text = chat_renderer(tokenizer, {**arguments, "add_generation_prompt": True})(messages)
    return tokenize_with(tokenizer)(text)


def _questions(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> list[Prompt]:
    """Return the questions as prompts; none if the tokenizer has no template that can ask them."""
    try:
        return [
            Prompt(in_template(tokenizer, arguments, [{"role": "user", "content": text}]), text) for text in QUESTIONS
        ]
    except CalibrationError:
        return []


def longest_input(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model reads, its answer included; None for any number."""
    longest: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest
