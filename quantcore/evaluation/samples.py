"""What the original and the quantized model write, side by side: a person sees nonsense at once, and so does a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

PROMPT_LEN = 24
NEW_TOKENS = 24


def continue_prompts(model: PreTrainedModel, ids_NT: torch.Tensor, eos_token_id: int | None) -> list[list[int]]:
    """The most likely NEW_TOKENS tokens after each prompt [N, T], all of one length; fewer where a text ends."""
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=eos_token_id,
        pad_token_id=0 if eos_token_id is None else eos_token_id,
    )
    ids_NT = ids_NT.to(model.device)
    with torch.inference_mode():
        out_NT: torch.Tensor = model.generate(  # type: ignore[operator]
            ids_NT, attention_mask=torch.ones_like(ids_NT), generation_config=settings
        )
    rows = out_NT[:, ids_NT.shape[1] :].tolist()
    return [row[: row.index(eos_token_id)] if eos_token_id in row else row for row in rows]


def is_degenerate(ids: list[int]) -> bool:
    """Nothing at all, or one and the same token through all of the second half."""
    return not ids or len(set(ids[len(ids) // 2 :])) == 1


@dataclass(frozen=True)
class Sample:
    """One prompt and how both models go on. ``original`` is None where only one model was there."""

    prompt: str
    original: str | None
    quantized: str
    original_is_degenerate: bool
    quantized_is_degenerate: bool
