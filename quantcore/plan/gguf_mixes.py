"""The type that llama.cpp's own tool gives each tensor in a named mix such as Q4_K_M. No torch.

Rules as in ``llama-quant.cpp`` of llama.cpp (build 11434, October 2026), for a file that is made without an importance
matrix. They give more bits to what costs most: values, the second matrix of the MLP, the output projection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quantcore.checkpoint.model_config import ModelConfig
from quantcore.config.gguf_types import MIXES, SHORT_ROWS
from quantcore.config.spec import SUPER_BLOCK
from quantcore.export.gguf.tensor_names import ARCHITECTURES

_IN_BLOCK = re.compile(r"^blk\.(\d+)\.(attn_v|attn_qkv|attn_k|attn_output|ffn_down)(_exps)?\.weight$")

_VALUES_WITH_SHARED_HEADS = {"Q2_K": "Q4_K", "IQ4_NL": "Q5_K", "IQ4_XS": "Q5_K"}
"""Of models in which at least four heads share their keys and values."""
_VALUES = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
_DOWN = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
_ATTENTION_OUTPUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
_ATTENTION_OUTPUT_OF_8_EXPERTS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")  # Q5_K


@dataclass(frozen=True)
class _Shape:
    """What the rules ask of a model."""

    num_layers: int
    heads_per_value: int
    num_experts: int
    is_70b: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        sizes = ModelConfig(config)
        per_value = (sizes.num_heads or 1) // (sizes.num_key_value_heads or 1)
        num_layers = sizes.num_layers or 0
        name = ARCHITECTURES[str(config["model_type"])].name
        return cls(
            num_layers,
            per_value,
            sizes.num_experts or 0,
            num_layers == 80 and (name == "qwen2" or (name == "llama" and per_value > 1)),
        )

    def has_more_bits(self, index: int) -> bool:
        """Return True for the first and the last eighth of the layers, and for every third between."""
        eighth = self.num_layers // 8
        return index < eighth or index >= 7 * self.num_layers // 8 or (index - eighth) % 3 == 2


def type_in_mix(mix: str, stored: str, width: int, model_config: Mapping[str, Any], *, is_tied: bool) -> str:
    """Return the GGUF type of the tensor called ``stored`` in the file, with rows of ``width``, in the named ``mix``.

    ``is_tied``: the embedding is the output projection as well. The types of rows that are too short for super-blocks
    are chosen afterwards (``SHORT_ROWS``).
    """
    usual, shape = MIXES[mix], _Shape.of(model_config)
    if stored == "output.weight" or (is_tied and stored == "token_embd.weight"):
        is_short = usual in SHORT_ROWS and width % SUPER_BLOCK
        return "Q8_0" if usual == "Q8_0" or is_short else "Q6_K"
    match = _IN_BLOCK.match(stored)
    if match is None:
        return usual
    index, role = int(match[1]), match[2]
    if role in ("attn_v", "attn_qkv"):
        return _of_values(mix, index, shape)
    if role == "attn_k":
        return "Q8_0" if shape.num_experts == 8 else usual
    if role == "ffn_down":
        return _of_down(mix, index, shape)
    if shape.num_experts == 8:
        return "Q5_K" if mix in _ATTENTION_OUTPUT_OF_8_EXPERTS else usual
    return _ATTENTION_OUTPUT.get(mix, usual)


def _of_values(mix: str, index: int, shape: _Shape) -> str:
    if shape.num_experts == 8:
        return "Q8_0"
    kind = _VALUES.get(mix, MIXES[mix])
    if shape.heads_per_value >= 4:
        kind = _VALUES_WITH_SHARED_HEADS.get(mix, kind)
    if mix in ("Q4_K_M", "Q5_K_M") and shape.has_more_bits(index):
        kind = "Q6_K"
    elif (mix == "Q4_K_S" and index < 4) or (mix == "Q3_K_M" and index < 2):
        kind = "Q5_K"
    return "Q5_K" if shape.is_70b and kind in ("Q3_K", "Q4_K") else kind


def _of_down(mix: str, index: int, shape: _Shape) -> str:
    if mix in ("Q4_K_M", "Q5_K_M") and shape.has_more_bits(index):
        return "Q6_K"
    if mix == "Q3_K_M" and index < shape.num_layers // 16:
        return "Q5_K"
    if mix in ("Q4_K_S", "IQ4_NL", "IQ4_XS") and index < shape.num_layers // 8:
        return "Q5_K"
    return _DOWN.get(mix, MIXES[mix])
