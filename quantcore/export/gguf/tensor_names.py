"""Maps the tensors of a checkpoint to llama.cpp's: GGUF's names and layouts for the architectures known here.

Names as in gguf's tensor map, layouts as llama.cpp's own converter writes them. No torch, no gguf: a plan needs this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.model_config import HEAD_DIMS, ModelConfig, first
from quantcore.errors import ConfigError

FILE_NAME = "model.gguf"
_BLOCK = re.compile(r"^model\.layers\.(?P<index>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)$")
_STORED_BLOCK = re.compile(r"^blk\.(?P<index>\d+)\.(?P<module>\w+)\.(?P<kind>weight|bias)$")
_EXPERT = re.compile(r"^(?P<stack>.+\.experts)\.(?P<index>\d+)\.(?P<projection>\w+)$")
COMPUTED = (".rotary_emb.inv_freq", ".attention.masked_bias")  # old checkpoints store them; they are computed anyway

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MIXTRAL = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
_QWEN_MOE = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
}


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture. ``blocks`` are the names of a decoder block's modules there.

    ``interleaved``: its RoPE rotates neighbouring rows of a query or key head, not rows of its two halves.
    ``norm_offset``: the number to add to the checkpoint's RMS norms. ``own_head``: it may have a separate output
    projection. ``assumes``: values of config.json that llama.cpp assumes. ``class_name``: that of the model in
    Transformers which reads a file of this architecture. ``window``: the file has a sliding window of no layer, of
    those that config.json lists, or of all, where 0 stands for none. ``warns_of_window``: llama.cpp computes without
    it. ``depth_with_wide_attention``: the number of blocks by which llama.cpp knows a model whose attention is divided
    by another number than the width of a head.
    """

    name: str
    class_name: str
    blocks: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    own_head: bool = True
    assumes: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    window: Literal["none", "by_layer", "all"] = "none"
    warns_of_window: bool = True
    depth_with_wide_attention: int | None = None


_LLAMA = Architecture("llama", "LlamaForCausalLM", _ATTENTION | _TWO_NORMS | _MLP, interleaved=True)
_GEMMA = _ATTENTION | _FOUR_NORMS | _MLP
_GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
_QWEN = {"hidden_act": "silu", "use_sliding_window": False}

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Architecture("llama", "MixtralForCausalLM", _ATTENTION | _TWO_NORMS | _MIXTRAL, interleaved=True),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", _ATTENTION | _TWO_NORMS | _MLP, assumes=_QWEN, warns_of_window=False
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _ATTENTION | _HEAD_NORMS | _TWO_NORMS | _MLP,
        assumes=_QWEN,
        warns_of_window=False,
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION | _HEAD_NORMS | _TWO_NORMS | _QWEN_MOE,
        assumes=_QWEN | {"norm_topk_prob": True},
        warns_of_window=False,
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA,
        norm_offset=1.0,
        own_head=False,
        assumes=_GEMMA_ACTIVATION,
        window="by_layer",
        warns_of_window=False,
        depth_with_wide_attention=46,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        _GEMMA | _HEAD_NORMS,
        norm_offset=1.0,
        assumes=_GEMMA_ACTIVATION,
        window="by_layer",
        warns_of_window=False,
        depth_with_wide_attention=62,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _TWO_NORMS
        | {
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        window="all",  # Phi 4 has none
    ),
}
"""Architectures by the model_type of config.json."""

GEMMA_HEAD = 256  # the default of head_dim in Transformers
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "longrope")


def has_own_layout(model_config: Mapping[str, Any]) -> bool:
    """Return True if names and order of the tensors are known here; else llama.cpp's converter is asked."""
    return model_config.get("model_type") in ARCHITECTURES


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint's tensor in the file: the tensor ``name`` there, or expert number ``index`` of it.

    The rows of each of ``num_heads`` heads are interleaved (0: rows keep their order). ``offset`` is added. With
    ``moved_heads``, (keys, values per key), the columns are those of the heads of values: in the checkpoint those of
    one key lie together, in the file the first ones of all keys.
    """

    name: str
    index: int | None = None
    num_heads: int = 0
    offset: float = 0.0
    moved_heads: tuple[int, ...] = ()


class Places:
    """The places of the tensors of a model with this config.json. Raises ConfigError for an unknown architecture."""

    def __init__(self, model_config: Mapping[str, Any]) -> None:
        model_type = str(model_config.get("model_type"))
        if model_type not in ARCHITECTURES:
            raise _refused(f"there is no supported GGUF architecture for models of type '{model_type}'", ARCHITECTURES)
        self.architecture = ARCHITECTURES[model_type]
        sizes = ModelConfig(model_config)
        self._heads = {"attn_q": sizes.num_heads or 0, "attn_k": sizes.num_key_value_heads or 0}

    def find(self, name: str) -> Place | None:
        """Return the place of the checkpoint's tensor ``name``; None if the architecture has none for it."""
        match, index = _BLOCK.match(name), None
        if match is None:
            module, _, kind = name.rpartition(".")
            base = _OUTSIDE.get(module) if self.architecture.own_head or module != "lm_head" else None
            prefix = ""
        else:
            module, kind, prefix = match["module"], match["kind"], f"blk.{match['index']}."
            if expert := _EXPERT.match(module):
                module, index = f"{expert['stack']}.{expert['projection']}", int(expert["index"])
            base = self.architecture.blocks.get(module)
        if base is None:
            return None
        is_norm = kind == "weight" and module.endswith("norm")
        return Place(
            f"{prefix}{base}.{kind}",
            index,
            self._heads.get(base, 0) if self.architecture.interleaved else 0,
            self.architecture.norm_offset if is_norm else 0.0,
        )

    def names(self, stored: str, num_experts: int) -> list[str]:
        """Return the checkpoint's tensors that lie in the file's tensor ``stored``: one, or the experts of a stack."""
        match = _STORED_BLOCK.match(stored)
        if match is None:
            module, _, kind = stored.rpartition(".")
            return [f"{name}.{kind}" for name, stored_module in _OUTSIDE.items() if stored_module == module]
        prefix = f"model.layers.{match['index']}."
        modules = [name for name, stored_module in self.architecture.blocks.items() if stored_module == match["module"]]
        before, experts, projection = modules[0].partition(".experts.") if modules else ("", "", "")
        if not experts:
            return [f"{prefix}{name}.{match['kind']}" for name in modules]
        return [f"{prefix}{before}.experts.{index}.{projection}.{match['kind']}" for index in range(num_experts)]

    def layout(self, name: str, tensor: TensorHeader) -> TensorLayout | None:
        """Return the layout of a tensor that is not quantized: matrices in their dtype, others and routers in float32.

        Returns None for a tensor that the consumer computes itself.
        """
        if name.endswith(COMPUTED):
            return None
        place = self.find(name)
        is_router = place is not None and place.name.endswith("ffn_gate_inp.weight")
        return TensorLayout("F32" if len(tensor.shape) == 1 or is_router else tensor.dtype, tensor.shape)

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        """Raise ConfigError for a model that does not fit the format.

        Reasons are tensors without a place, experts that do not fit one stack, or a config that llama.cpp would not
        follow.
        """
        homeless = [name for name in layouts if self.find(name) is None]
        if homeless:
            raise _refused(
                f"the GGUF architecture '{self.architecture.name}' has no place for {len(homeless)} tensor(s) of this"
                f" model, first '{homeless[0]}'"
            )
        stacks: dict[str, tuple[str, TensorLayout]] = {}
        for name, layout in layouts.items():
            place = self.find(name)
            if place is not None and place.index is not None:
                first, same = stacks.setdefault(place.name, (name, layout))
                if same != layout:
                    raise _refused(f"the experts of a layer must form one tensor, but {name} differs from {first}")
        assumes = {**self.architecture.assumes, "query_pre_attn_scalar": attention_scalar(model_config)}
        for key, value in assumes.items():
            if model_config.get(key, value) != value:
                raise _refused(f"llama.cpp assumes {key} {value}, but config.json has {model_config[key]}")
        for rope in rope_parts(model_config):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in ROPE_TYPES:
                raise _refused(f"RoPE of type '{kind}' is not supported (only {', '.join(ROPE_TYPES)})")


def stored_part(header: TensorHeader, place: Place) -> TensorHeader:
    """Return the header of the tensor at ``place``: the whole tensor, or one expert of a stack."""
    shape, begin, size = header.shape, header.begin, header.num_bytes
    if place.index is not None:
        size //= shape[0]
        shape, begin = shape[1:], begin + place.index * size
    return TensorHeader(
        header.dtype, shape, header.file, begin, begin + size, num_heads=place.num_heads, offset=place.offset
    )


def attention_scalar(model_config: Mapping[str, Any]) -> int:
    """Return the number whose square root divides Gemma's attention."""
    sizes = ModelConfig(model_config)
    if sizes.num_layers == ARCHITECTURES[model_config["model_type"]].depth_with_wide_attention:
        return (sizes.hidden_size or 0) // (sizes.num_heads or 1)
    return first(model_config, HEAD_DIMS) or GEMMA_HEAD


def rope_parts(model_config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the RoPE settings of config.json: one for all layers, or one for each kind of layer."""
    rope = model_config.get("rope_parameters") or model_config.get("rope_scaling") or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)]
    return parts or [rope]


def _refused(reason: str, allowed: Mapping[str, object] | None = None) -> ConfigError:
    names = sorted(allowed or ())
    return ConfigError(
        f"The gguf format cannot store this model: {reason}.",
        code="incompatible_export",
        hint=f"Supported models: {', '.join(names)}." if names else "Remove gguf from the formats.",
        field="/export",
        allowed=names,
    )
