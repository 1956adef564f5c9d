"""The type that llama.cpp's own tool gives each tensor in a named mix such as Q4_K_M. No torch.

Rules as in ``llama-quant.cpp`` of llama.cpp (build 11434, October 2026), for a file that is made without an importance
matrix, or with one in the mixes that need it: IQ1, IQ2, IQ3_XXS and IQ3_XS. They give more bits to what costs most:
values, the second matrix of the MLP, the output projection. They go by the names of the tensors in the file, and by how
many tensors of a kind came before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantcore.config.gguf_types import MIXES, SHORT_ROWS
from quantcore.config.spec import SUPER_BLOCK

_BLOCK = re.compile(r"^blk\.(\d+)\.")

_KEPT_PARTS = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
"""Tensors that stay in floats: parts of their names, and whole names."""
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_ROLES = {
    "attn_qkv.weight": "values", "attn_kv_b.weight": "values", "attn_v.weight": "values", "attn_k.weight": "keys",
    "attn_q.weight": "queries", "attn_output.weight": "attention output", "ffn_up": "up", "ffn_gate": "gate",
    "ffn_down": "down",
}  # fmt: skip
"""The first of these in a tensor's name -> the role that the rules know it by."""

_VALUES_WITH_SHARED_HEADS = {
    "Q2_K": "Q4_K", "IQ4_NL": "Q5_K", "IQ4_XS": "Q5_K", "IQ3_XXS": "Q4_K", "IQ3_XS": "Q4_K", "IQ3_S": "Q4_K",
}  # fmt: skip
"""Of models in which at least four heads share their keys and values."""
_VALUES = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
_DOWN = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
_ATTENTION_OUTPUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K"}
_ATTENTION_OUTPUT_OF_8_EXPERTS = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M",
)  # Q5_K  # fmt: skip
_QUERIES_AND_KEYS = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
_BELOW_3_BITS = {
    "IQ1_S": "Q2_K", "IQ1_M": "Q2_K", "IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S",
}  # fmt: skip
"""Mixes with rules of their own, and the type of their embedding, of their values and of the first down projections."""
_EMBEDDING = {**_BELOW_3_BITS, "IQ3_XXS": "IQ3_S", "TQ1_0": "Q4_K", "TQ2_0": "Q4_K"}
_OUTPUT_OF_5_BITS = (*_BELOW_3_BITS, "IQ3_XXS")
_70B = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
"""Number of layers by which llama.cpp knows a 70B model of an architecture."""
WITH_OTHER_RULES = ("glm5-next",)
"""Architectures with rules of their own in llama.cpp, which are not known here."""


@dataclass(frozen=True)
class Traits:
    """What the rules ask of a model, as in a GGUF file's metadata. ``heads_per_value`` is that of the first layer."""

    architecture: str
    num_layers: int
    heads_per_value: int
    num_experts: int

    @property
    def is_70b(self) -> bool:
        """True for the models of which llama.cpp gives the values more bits."""
        shares_heads = self.architecture != "llama" or self.heads_per_value > 1
        return _70B.get(self.architecture) == self.num_layers and shares_heads


def types_in_mix(mix: str, shapes: Mapping[str, Sequence[int]], traits: Traits) -> dict[str, str | None]:
    """Return the GGUF type of each tensor of a file in the named ``mix``; None for one that stays as it is.

    ``shapes`` have the tensors by their names in the file, with the width of a row last. The types of rows that are too
    short for super-blocks are chosen afterwards (``SHORT_ROWS``).
    """
    names = sorted(shapes, key=_place)
    is_tied = "output.weight" not in shapes
    roles = {name: _role(name, is_tied=is_tied) for name in names}
    rules = _Rules(mix, traits, sum(role == "values" for role in roles.values()))
    return {
        name: rules.type_of(name, roles[name], shapes[name]) if _is_quantized(name, shapes[name]) else None
        for name in names
    }


def _place(name: str) -> tuple[int, str]:
    """Return the key of llama.cpp's order of tensors."""
    block = _BLOCK.match(name)
    return int(block[1]) if block else -1, name


def _is_quantized(name: str, shape: Sequence[int]) -> bool:
    num_sides = len(shape) - next((count for count, side in enumerate(shape) if side > 1), 0)
    is_kept = name in _KEPT_NAMES or any(part in name for part in _KEPT_PARTS)
    return num_sides > 1 and name.endswith("weight") and not is_kept


def _role(name: str, *, is_tied: bool) -> str:
    if name == "output.weight" or (is_tied and name in EMBEDDINGS):
        return "output"
    if name in EMBEDDINGS:
        return "embedding"
    return next((role for part, role in _ROLES.items() if part in name), "")


class _Rules:
    """The rules of a mix, applied to one tensor after another in llama.cpp's order."""

    def __init__(self, mix: str, traits: Traits, num_values: int) -> None:
        self._mix, self._traits, self._num_values = mix, traits, num_values
        self._usual = MIXES[mix]
        self._num_seen = dict.fromkeys(("values", "down", "up", "gate"), 0)

    def type_of(self, name: str, role: str, shape: Sequence[int]) -> str:
        if self._mix == "MXFP4_MOE":
            return self._of_stacks(role, shape)
        index, width = self._num_seen.get(role, 0), shape[-1]
        self._num_seen[role] = index + 1
        if role == "output":
            is_short = width % (SUPER_BLOCK if self._usual in SHORT_ROWS else 32)
            if self._usual == "Q8_0" or is_short or self._is_falcon:
                return "Q8_0"
            return "Q5_K" if self._mix in _OUTPUT_OF_5_BITS else "Q6_K"
        if role == "embedding":
            return _EMBEDDING.get(self._mix, self._usual)
        if self._mix in _BELOW_3_BITS:
            return self._below_3_bits(role, index)
        if role == "values":
            return self._of_values(index)
        if role == "keys":
            return "Q8_0" if self._traits.num_experts == 8 else _QUERIES_AND_KEYS.get(self._mix, self._usual)
        if role == "queries":
            return _QUERIES_AND_KEYS.get(self._mix, self._usual)
        layer = _place(name)[0] if self._traits.num_experts > 1 else index
        if role in ("up", "gate"):
            num_layers = self._traits.num_layers
            is_middle = num_layers // 8 <= layer < 7 * num_layers // 8
            return "IQ3_XXS" if self._mix == "IQ3_XS" and is_middle else self._usual
        if role == "down":
            return self._of_down(layer)
        return self._of_attention_output() if role == "attention output" else self._usual

    def _of_stacks(self, role: str, shape: Sequence[int]) -> str:
        """Return the type of a tensor in the mix that has its own type in stacks of matrices only."""
        is_stack = role != "output" and len(shape) > 2 and shape[0] > 1
        if self._traits.architecture == "bailingmoe3":  # its attention has stacks, too
            is_stack = is_stack and role in ("up", "gate", "down")
        return self._usual if is_stack else "Q8_0"

    @property
    def _is_falcon(self) -> bool:
        return self._traits.architecture == "falcon"

    def _below_3_bits(self, role: str, index: int) -> str:
        """Return the type of a tensor in a mix of IQ2, of which ``index`` with this role came before."""
        more, num_experts = _BELOW_3_BITS[self._mix], self._traits.num_experts
        if role == "values":
            return "Q4_K" if self._traits.heads_per_value >= 4 or num_experts >= 4 else more
        if role == "keys" and num_experts == 8:
            return "Q4_K"
        if role == "down":
            return more if index < self._traits.num_layers // 8 else self._usual
        if role == "attention output":
            if num_experts == 8:
                return "Q5_K"
            return "IQ2_XXS" if self._mix in ("IQ1_S", "IQ1_M") else "IQ3_S" if more == "IQ3_S" else self._usual
        return self._usual

    def _of_values(self, index: int) -> str:
        mix, traits = self._mix, self._traits
        if traits.num_experts == 8:
            return "Q8_0"
        kind = _VALUES.get(mix, self._usual)
        if traits.heads_per_value >= 4:
            kind = _VALUES_WITH_SHARED_HEADS.get(mix, kind)
        if mix in ("Q4_K_M", "Q5_K_M") and _has_more_bits(index, self._num_values):
            kind = "Q6_K"
        elif (mix == "Q4_K_S" and index < 4) or (mix == "Q3_K_M" and index < 2):
            kind = "Q5_K"
        return "Q5_K" if traits.is_70b and kind in ("Q3_K", "Q4_K") else kind

    def _of_down(self, index: int) -> str:
        mix, num_layers = self._mix, self._traits.num_layers
        has_more_bits, is_early = _has_more_bits(index, num_layers), index < num_layers // 8
        if self._is_falcon and mix in ("Q3_K_M", "Q3_K_L", "Q4_K_M", "Q4_K_S"):
            first, more, rest = {
                "Q3_K_M": ("Q5_K", "Q4_K", "Q3_K"), "Q3_K_L": ("Q4_K", "Q4_K", "Q4_K"),
                "Q4_K_M": ("Q6_K", "Q5_K", "Q4_K"), "Q4_K_S": ("Q4_K", "Q4_K", "Q4_K"),
            }[mix]  # fmt: skip
            return first if index < num_layers // 16 else more if has_more_bits else rest
        if mix in ("Q4_K_M", "Q5_K_M") and has_more_bits:
            return "Q6_K"
        if mix == "Q3_K_M" and index < num_layers // 16:
            return "Q5_K"
        if mix in ("Q4_K_S", "IQ4_NL", "IQ4_XS") and is_early:
            return "Q5_K"
        if mix == "IQ3_M" and (is_early or (self._traits.num_experts == 8 and has_more_bits)):
            return "Q4_K"
        return _DOWN.get(mix, self._usual)

    def _of_attention_output(self) -> str:
        if self._is_falcon:
            return "Q4_K" if self._mix == "Q3_K_L" else self._usual
        if self._traits.num_experts == 8:
            return "Q5_K" if self._mix in _ATTENTION_OUTPUT_OF_8_EXPERTS else self._usual
        return _ATTENTION_OUTPUT.get(self._mix, self._usual)


def _has_more_bits(index: int, count: int) -> bool:
    """Return True for the first and the last eighth of the layers, and for every third between."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2
