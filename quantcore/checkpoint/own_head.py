"""A separate output projection despite a config.json that ties it to the embedding's weight.

``from_pretrained`` ties the two only if their values are equal; other programs (vLLM) follow config.json, and drop what
the files hold. So a model whose files hold both is read, and its results are written, as one that ties nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quantcore.checkpoint.layers import is_head
from quantcore.checkpoint.roles import DRAFT_PART

TIES = "tie_word_embeddings"


def untie_own_head(config: Mapping[str, Any], tensors: Iterable[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``config`` without the tie if ``tensors`` hold the head, and a warning if it asked for one.

    Left alone are models for which the same field does more than that: encoder-decoders (T5 scales its logits by it)
    and masked models, which share a bias as well. Transformers compares the values of those, too, when it loads them.
    """
    head = next((name for name in tensors if is_head(name) and _is_single(name)), None)
    if head is None or _ties_more(config):
        return dict(config), ()
    texts = {key: {**text, TIES: False} for key, text in _texts(config).items()}
    asked = any(part.get(TIES) for part in (config, *_texts(config).values()))
    warning = (
        f"config.json says {TIES}, but the files contain '{head}' as well. It is used unchanged, as in Transformers "
        "where it differs from the embedding, and the result's config.json declares untied weights. Programs that "
        "follow the original's config.json, such as vLLM, use the embedding instead."
    )
    return {**config, **texts, TIES: False}, (warning,) if asked else ()


def _texts(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the nested configs of language models."""
    nested = {key: part for key, part in config.items() if isinstance(part, dict)}
    return {key: part for key, part in nested.items() if key == "text_config" or TIES in part}


def _ties_more(config: Mapping[str, Any]) -> bool:
    is_masked = any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ())
    return is_masked or any(part.get("is_encoder_decoder") for part in (config, *_texts(config).values()))


def _is_single(name: str) -> bool:
    return not name.endswith("decoder.weight") and DRAFT_PART.search(name) is None
