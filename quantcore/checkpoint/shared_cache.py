"""Layers that use the keys and values of an earlier layer, or the same tensor for both (Gemma 3n, Gemma 4).

Published checkpoints hold ``k_proj`` and ``v_proj`` of layers that share their cache all the same; Transformers ignores
them when it loads (``_keys_to_ignore_on_load_unexpected``). Runtimes that fuse q, k and v into one layer look for all
three names in a ``quantization_config``, also for those that a checkpoint lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantcore.checkpoint.blocks import Blocks

SHARED = "unused: the layer shares the keys and values of an earlier one"
_KEYS_AND_VALUES = ("k_proj", "v_proj")


def find_unused(names: Iterable[str], config: Mapping[str, Any], blocks: Blocks) -> set[str]:
    """Return those of the layers ``names`` that no program runs, since their block reads another one's cache."""
    num_shared = _text(config).get("num_kv_shared_layers") or 0
    first = len(blocks) - num_shared
    return {
        name
        for name in names
        if num_shared
        and name.rpartition(".")[2] in _KEYS_AND_VALUES
        and (block := blocks.number_of(f"{name}.weight")) is not None
        and first <= block < len(blocks)
    }


def missing_siblings(names: Iterable[str], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, like) for each k_proj or v_proj that the model lacks, beside the ``names`` that it has.

    It is quantized as ``like``: values as keys where both are one tensor, else as the queries.
    """
    text, known = _text(config), set(names)
    if not (text.get("attention_k_eq_v") or text.get("num_kv_shared_layers")):
        return
    for name in sorted(known):
        owner, _, last = name.rpartition(".")
        if last == "q_proj":
            keys, values = (f"{owner}.{part}" for part in _KEYS_AND_VALUES)
            if keys not in known:
                yield keys, name
            if values not in known:
                yield values, keys if keys in known else name


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
