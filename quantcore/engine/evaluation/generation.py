"""Generates text with a model as a whole: greedy answers to prompts, many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.streamers import BaseStreamer

from quantcore.checkpoint.headers import read_json
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.tokenizer import tokenize_with
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.importing.model import Model

Message = dict[str, Any]

BATCH = 8
"""Prompts that are continued together: their caches are in memory at once."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: its tokens, and the text that is shown for it."""

    ids: list[int]
    text: str


def continue_prompts(
    model: EvaluatedModel,
    prompts: Sequence[Prompt],
    ends: Sequence[int],
    new_tokens: int,
    sampling: Mapping[str, float] | None = None,
    seed: int = 0,
    batch: int = BATCH,
) -> list[list[int]]:
    """Return the most likely tokens after each prompt: ``new_tokens``, or fewer where one of ``ends`` comes, the last.

    With ``sampling``, settings of GenerationConfig such as ``temperature``, they are drawn, by ``seed``.

    ``batch`` prompts of about the same length are continued together. They are filled up on the left to one length,
    and the model does not attend to what fills them. A model with a recurrent state would read it all the same, so it
    continues one prompt at a time.
    """
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=sampling is not None,
        max_new_tokens=new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        **(sampling or {}),
    )
    by_length = sorted(range(len(prompts)), key=lambda place: len(prompts[place].ids))
    answers: dict[int, list[int]] = {}
    with model.whole() as whole, torch.inference_mode(), _drawing_alone(whole.device):
        torch.manual_seed(seed)
        size = 1 if whole._is_stateful else batch
        for start in range(0, len(prompts), size):
            places = by_length[start : start + size]
            rows = _answers(whole, [prompts[place].ids for place in places], settings)
            answers |= {place: _to_its_end(row, ends) for place, row in zip(places, rows, strict=True)}
    return [answers[place] for place in range(len(prompts))]


def _drawing_alone(device: torch.device) -> AbstractContextManager[None]:
    """Leave the random numbers of the CPU, and of this device of several, where they were."""
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)


def without_end(answer: list[int], ends: Sequence[int]) -> list[int]:
    """Return an answer without the token that ended it."""
    return answer[:-1] if answer and answer[-1] in ends else answer


def _to_its_end(row: list[int], ends: Sequence[int]) -> list[int]:
    return row[: next((place + 1 for place, token in enumerate(row) if token in ends), len(row))]


def _answers(model: PreTrainedModel, prompts: Sequence[list[int]], settings: GenerationConfig) -> list[list[int]]:
    """Return the new tokens after each of some ``prompts``; those behind the end of an answer fill it up."""
    length = max(map(len, prompts))
    ids_NT = torch.tensor([[settings.pad_token_id] * (length - len(ids)) + ids for ids in prompts])
    mask_NT = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
    rows: list[list[int]] = generate(model, ids_NT, settings, mask_NT=mask_NT)[:, length:].tolist()
    return rows


def generate(
    model: PreTrainedModel,
    ids_NT: torch.Tensor,
    settings: GenerationConfig,
    streamer: BaseStreamer | None = None,
    mask_NT: torch.Tensor | None = None,
) -> torch.Tensor:
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


def end_tokens(model: Model, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer, from config.json, generation_config.json and the tokenizer."""
    config, generation = model.headers.config, model.folder / "generation_config.json"
    text_config = config.get("text_config")
    found = numbers(config.get("eos_token_id")) | numbers(tokenizer.eos_token_id)
    if isinstance(text_config, dict):
        found |= numbers(text_config.get("eos_token_id"))
    if generation.is_file():
        found |= numbers(read_json(generation, "no_generation_config").get("eos_token_id"))
    return found


def numbers(given: object) -> frozenset[int]:
    """Return the numbers that a file gives for a kind of token: none, one or a list."""
    values = given if isinstance(given, list | tuple) else [given]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))


def in_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: list[Message]) -> list[int]:
    """Return the tokens of a chat, up to where an answer begins. Raises CalibrationError as ``chat_renderer``."""
    text = chat_renderer(tokenizer, {**arguments, "add_generation_prompt": True})(messages)
    return tokenize_with(tokenizer)(text)


def longest_input(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model reads, its answer included; None for any number."""
    longest: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest
