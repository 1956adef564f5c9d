"""Reads sizes of a model from its config.json, under every name that a family gives them.

Another list of such names anywhere else is one that misses a family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
HEAD_DIMS = ("head_dim", "attention_head_dim", "kv_channels", "qk_nope_head_dim", "d_kv")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k",
    "num_selected_experts", "router_top_k",
)  # fmt: skip
DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
VOCABULARIES = ("vocab_size",)
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_NUM_CACHED_HEADS = re.compile(
    r"(?!linear_)(.*num_(global_)?(attention|key_value|kv)_heads|num_heads|n_head|.*attention_heads)"
)
_CACHED_HEAD_DIM = re.compile(r"(?!linear_).*head_dim(_\w+)?")
_CACHED_HIDDEN = ("hidden_size", "n_embd", "d_model", "attention_hidden_size")


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a language model; of a model with towers, those of its text part. None: config.json does not say."""

    raw: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of config.json for the language model, or all of it."""
        inner = (self.raw[key] for key in TEXT_CONFIGS if isinstance(self.raw.get(key), Mapping))
        part = next(inner, None)
        return self.raw if part is None else ModelConfig(part).text

    @property
    def hidden_size(self) -> int | None:
        return first(self.text, HIDDEN)

    @property
    def num_layers(self) -> int | None:
        return first(self.text, DEPTH)

    @property
    def num_heads(self) -> int | None:
        return first(self.text, HEADS)

    @property
    def num_key_value_heads(self) -> int | None:
        """The heads of keys and values, which are those of the queries unless config.json says otherwise."""
        return first(self.text, KEY_VALUE_HEADS) or self.num_heads

    @property
    def head_dim(self) -> int | None:
        """The width of a head of keys and values."""
        heads, hidden = self.num_heads, self.hidden_size
        return first(self.text, HEAD_DIMS) or (hidden // heads if heads and hidden else None)

    @property
    def max_positions(self) -> int | None:
        """The number of tokens of the longest text."""
        return first(self.text, MAX_POSITIONS)

    @property
    def vocab_size(self) -> int | None:
        return first(self.text, VOCABULARIES) or first(self.raw, VOCABULARIES)

    @property
    def vocab_sizes(self) -> list[int]:
        """The numbers of tokens of all parts of config.json: PI0's text config is deep inside."""
        return [size for part in self._parts() if (size := first(part, VOCABULARIES))]

    @property
    def num_experts(self) -> int | None:
        """The number of experts of a mixture, from any part of config.json."""
        return next((found for part in self._parts() if (found := first(part, EXPERTS)) and found > 1), None)

    @property
    def num_experts_per_token(self) -> int | None:
        """The number of experts per token, from the same part as ``num_experts``."""
        mixtures = (part for part in self._parts() if (first(part, EXPERTS) or 0) > 1)
        return next((first(part, EXPERTS_PER_TOKEN) for part in mixtures), None)

    @property
    def cache_widths(self) -> set[int]:
        """The possible numbers of channels of a token's keys or values; empty if config.json does not say.

        Blocks of several kinds may have heads of their own, under names of their own.
        """
        numbers = list(_numbers(self.raw))
        heads = {value for key, value in numbers if _NUM_CACHED_HEADS.fullmatch(key)}
        dims = {value for key, value in numbers if _CACHED_HEAD_DIM.fullmatch(key)}
        dims |= {value // num for key, value in numbers if key in _CACHED_HIDDEN for num in heads if not value % num}
        return {num * dim for num in heads for dim in dims}

    @property
    def predicts_tokens(self) -> bool:
        """False for a model of embeddings or scores, judged by its declared class; True without one."""
        declared = str((self.raw.get("architectures") or [""])[0])
        is_bare = declared.endswith("Model") and "LMHead" not in declared
        return not is_bare and not declared.endswith("ForSequenceClassification")

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        yield self.raw
        for value in self.raw.values():
            if isinstance(value, Mapping):
                yield from ModelConfig(value)._parts()


def first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first positive number that ``config`` has under one of these names."""
    return next((config[name] for name in names if type(config.get(name)) is int and config[name] > 0), None)


def required(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first positive number that ``config`` has under one of these names. Raises KeyError with the usual."""
    value = first(config, names)
    if value is None:
        raise KeyError(names[0])
    return value


def head_width(config: Mapping[str, Any]) -> int:
    """Return the width of an attention head. Raises KeyError if this part of config.json does not say it."""
    return first(config, HEAD_DIMS) or required(config, HIDDEN) // required(config, HEADS)


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the name and value of every positive integer in config.json and in the configs inside it."""
    for key, value in config.items():
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, Mapping):
                yield from _numbers(item)
            elif type(item) is int and item > 0:
                yield str(key), item
