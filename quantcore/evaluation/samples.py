"""Generates samples with the original and the quantized model, in which people and gates recognize nonsense."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from quantcore.evaluation.baseline_cache import BaselineCache
from quantcore.evaluation.model import EvaluatedModel
from quantcore.evaluation.quality import Sample
from quantcore.events import Emit, Progress, Warned
from quantcore.runtime.matmul import matmul_precision

PROMPT_LEN = 24
NEW_TOKENS = 16


def compare_samples(
    tokenizer: PreTrainedTokenizerBase, prompts_NT: torch.Tensor, original: EvaluatedModel, quantized: EvaluatedModel,
    baselines: BaselineCache, emit: Emit,
) -> tuple[Sample, ...]:  # fmt: skip
    """Continue prompts [N, T] with both models, one after the other; warn if there are none."""
    if not len(prompts_NT):
        emit(Warned("samples_left_out", f"No texts were continued: no window ends with {PROMPT_LEN} tokens of text."))
        return ()
    eos = tokenizer.eos_token_id
    settings = {"prompts": prompts_NT.tolist(), "new_tokens": NEW_TOKENS, "eos": eos}
    emit(Progress("verify", 1, 2, "samples of model"))
    before_NT = baselines.value(settings, lambda: continue_prompts(original, prompts_NT, eos))
    emit(Progress("verify", 2, 2, "samples of model"))
    after_NT = continue_prompts(quantized, prompts_NT, eos)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    return tuple(
        Sample(
            prompt=decode(prompt),
            original=decode(before),
            quantized=decode(after),
            original_is_degenerate=is_degenerate(before),
            quantized_is_degenerate=is_degenerate(after),
        )
        for prompt, before, after in zip(prompts_NT.tolist(), before_NT, after_NT, strict=True)
    )


def continue_prompts(model: EvaluatedModel, ids_NT: torch.Tensor, eos_token_id: int | None) -> list[list[int]]:
    """Return the NEW_TOKENS most likely tokens after each prompt [N, T]; fewer where a text ends."""
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=eos_token_id,
        pad_token_id=0 if eos_token_id is None else eos_token_id,
    )
    with model.whole() as whole, torch.inference_mode():
        rows = generate(whole, ids_NT, settings)[:, ids_NT.shape[1] :].tolist()
    return [row[: row.index(eos_token_id)] if eos_token_id in row else row for row in rows]


def generate(
    model: PreTrainedModel, ids_NT: torch.Tensor, settings: GenerationConfig, streamer: BaseStreamer | None = None
) -> torch.Tensor:
    """Return the prompts with their continuations, [N, T + at most max_new_tokens].

    ``streamer`` is given each token of a single prompt's continuation as soon as it is known.
    """
    ids_NT = ids_NT.to(model.device)
    with matmul_precision(model.device):  # in tiles: otherwise the whole head is held in float32, twice
        ids: torch.Tensor = model.generate(  # type: ignore[operator]
            ids_NT, attention_mask=torch.ones_like(ids_NT), generation_config=settings, streamer=streamer
        )
    return ids


def is_degenerate(ids: list[int]) -> bool:
    """Return True for an empty text, or one whose second half repeats a single token."""
    return not ids or len(set(ids[len(ids) // 2 :])) == 1
