"""The edges that discovery must find in decoder blocks of tiny models, written by hand from the models' code.

Four query heads of 16 share two value heads; the hidden size is 64, the inner size 128, that of experts 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantcore.engine.transforms.mappings.scale_pair import FoundEdges


@dataclass(frozen=True)
class Known:
    """An edge (``quantcore.engine.transforms.mappings.scale_pair.ScalePair``) as values that can be compared."""

    producer: str
    consumers: frozenset[str]
    rows: tuple[int, ...]
    channels: tuple[int, ...]
    plus_one: bool


def known(
    producer: str, consumers: str, num_inputs: int, rows: torch.Tensor | None = None,
    channels: torch.Tensor | None = None, plus_one: bool = False,
) -> Known:  # fmt: skip
    """Return an edge. ``consumers``: names separated by spaces. ``rows``, ``channels``: default all, in order."""
    plain = range(num_inputs)
    return Known(
        producer,
        frozenset(consumers.split()),
        tuple(plain if rows is None else rows.tolist()),
        tuple(plain if channels is None else channels.tolist()),
        plus_one,
    )


def as_known(found: FoundEdges) -> set[Known]:
    return {
        Known(
            edge.producer,
            frozenset(edge.consumers),
            tuple(edge.rows.tolist()),
            tuple(edge.channels.tolist()),
            edge.plus_one,
        )
        for edge in found.edges
    }


SHARED_HEADS = torch.arange(64) // 32 * 16 + torch.arange(64) % 16  # channel of v for each input of o
V_ROWS = torch.arange(32)
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"


def grouped(v: str, o: str) -> Known:
    """Return the edge v -> o where two query heads share a value head."""
    return known(v, o, 64, V_ROWS, SHARED_HEADS)


def gated(prefix: str, num_inner: int, names: str = "up_proj down_proj") -> Known:
    up, down = names.split()
    return known(f"{prefix}.{up}", f"{prefix}.{down}", num_inner)


def experts(prefix: str, num_inner: int, names: str = "up_proj down_proj") -> list[Known]:
    return [gated(f"{prefix}.{index}", num_inner, names) for index in range(4)]


def each_expert(prefix: str, names: str = "gate_proj up_proj") -> str:
    return " ".join(f"{prefix}.{index}.{name}" for index in range(4) for name in names.split())


def usual(mlp_norm: str = "post_attention_layernorm", plus_one: bool = False) -> list[Known]:
    """Return Llama's four edges."""
    return [
        known("input_layernorm", QKV, 64, plus_one=plus_one),
        grouped("self_attn.v_proj", "self_attn.o_proj"),
        known(mlp_norm, "mlp.gate_proj mlp.up_proj", 64, plus_one=plus_one),
        gated("mlp", 128),
    ]


def mixture(router: str, prefix: str, num_inner: int, names: str = "gate_proj up_proj down_proj") -> list[Known]:
    """Return the edges of a mixture: usual attention, one norm for the router and all experts."""
    gate, up, down = names.split()
    return [
        *usual()[:2],
        known("post_attention_layernorm", f"{router} {each_expert(prefix, f'{gate} {up}')}", 64),
        *experts(prefix, num_inner, f"{up} {down}"),
    ]


def heads(start: int, size: int) -> torch.Tensor:
    """Return the outputs of four heads of ``size`` each, from ``start`` of each head to its end."""
    return torch.arange(4 * size).reshape(4, size)[:, start:].reshape(-1)


DEEPSEEK_ATTENTION = [
    known("input_layernorm", "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa", 64),
    known("self_attn.q_a_layernorm", "self_attn.q_b_proj", 32),
    known("self_attn.kv_a_layernorm", "self_attn.kv_b_proj", 32),
    known("self_attn.kv_b_proj", "self_attn.o_proj", 128, heads(32, 64)),
]
SHARED_EXPERT = "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj"
QWEN_MIXTURE = [
    known(
        "post_attention_layernorm",
        f"mlp.gate mlp.shared_expert_gate {SHARED_EXPERT} {each_expert('mlp.experts')}", 64, plus_one=plus_one,
    )
    for plus_one in (False, True)
]  # fmt: skip

# model type, or (model type, block) where blocks differ; else block 1
KNOWN: dict[str | tuple[str, int], list[Known]] = {
    **{name: usual() for name in ("llama", "mistral", "qwen2", "qwen3", "granite", "stablelm")},
    "gemma2": usual("pre_feedforward_layernorm", plus_one=True),
    "gemma3_text": usual("pre_feedforward_layernorm", plus_one=True),
    "phi3": [
        known("input_layernorm", "self_attn.qkv_proj", 64),
        known("self_attn.qkv_proj", "self_attn.o_proj", 64, 96 + V_ROWS, SHARED_HEADS),
        known("post_attention_layernorm", "mlp.gate_up_proj", 64),
        known("mlp.gate_up_proj", "mlp.down_proj", 128, torch.arange(128, 256)),
    ],
    "opt": [
        known("self_attn_layer_norm", QKV, 64),
        known("self_attn.v_proj", "self_attn.out_proj", 64),
        known("final_layer_norm", "fc1", 64),
        known("fc1", "fc2", 128),
    ],
    "gpt_neox": [
        known("input_layernorm", "attention.query_key_value", 64),
        known("attention.query_key_value", "attention.dense", 64, heads(32, 48)),
        known("post_attention_layernorm", "mlp.dense_h_to_4h", 64),
    ],
    "bloom": [
        known("input_layernorm", "self_attention.query_key_value", 64),
        known("self_attention.query_key_value", "self_attention.dense", 64, heads(32, 48)),
        known("post_attention_layernorm", "mlp.dense_h_to_4h", 64),
    ],
    "falcon": [  # two groups of two queries, a key and a value
        known("ln_attn", "self_attention.query_key_value", 64),
        known(
            "self_attention.query_key_value", "self_attention.dense", 64,
            torch.cat([torch.arange(48, 64), torch.arange(112, 128)]), SHARED_HEADS,
        ),
        known("ln_mlp", "mlp.dense_h_to_4h", 64),
    ],
    "gpt2": [
        known("ln_1", "attn.c_attn", 64),
        known("attn.c_attn", "attn.c_proj", 64, torch.arange(128, 192)),
        known("ln_2", "mlp.c_fc", 64),
    ],
    "gptj": [
        known("ln_1", "attn.q_proj attn.k_proj attn.v_proj mlp.fc_in", 64),
        known("attn.v_proj", "attn.out_proj", 64),
    ],
    "cohere2": [known("input_layernorm", f"{QKV} mlp.gate_proj mlp.up_proj", 64), usual()[1], usual()[3]],
    "starcoder2": [*usual()[:2], known("post_attention_layernorm", "mlp.c_fc", 64)],
    "phi": [
        known("input_layernorm", f"{QKV} mlp.fc1", 64),
        grouped("self_attn.v_proj", "self_attn.dense"),
    ],
    "nemotron": [
        known("input_layernorm", QKV, 64, plus_one=True),
        usual()[1],
        known("post_attention_layernorm", "mlp.up_proj", 64, plus_one=True),
    ],
    "olmo": [usual()[1], usual()[3]],
    "olmo2": [usual()[1], usual()[3]],
    "mixtral": mixture("mlp.gate", "mlp.experts", 128, "w1 w3 w2"),
    "phimoe": mixture("mlp.router", "mlp.experts", 128, "w1 w3 w2"),
    "qwen3_moe": mixture("mlp.gate", "mlp.experts", 64),
    "olmoe": mixture("mlp.gate", "mlp.experts", 128),
    "granitemoe": mixture("block_sparse_moe.router", "block_sparse_moe.experts", 128),
    "gpt_oss": [
        *usual()[:2],
        known("post_attention_layernorm", f"mlp.router {each_expert('mlp.experts', 'gate_up_proj')}", 64),
    ],
    "qwen2_moe": [
        *usual()[:2], QWEN_MIXTURE[0], gated("mlp.shared_expert", 64), *experts("mlp.experts", 64),
    ],
    ("qwen3_next", 1): [
        *usual(plus_one=True)[:2], QWEN_MIXTURE[1], gated("mlp.shared_expert", 64), *experts("mlp.experts", 64),
    ],
    ("qwen3_next", 0): [
        known("input_layernorm", "linear_attn.in_proj_qkvz linear_attn.in_proj_ba", 64, plus_one=True),
        known(  # one weight for all heads
            "linear_attn.norm", "linear_attn.out_proj", 128, torch.arange(16), torch.arange(128) % 16
        ),
        QWEN_MIXTURE[1], gated("mlp.shared_expert", 64), *experts("mlp.experts", 64),
    ],
    ("deepseek_v3", 0): [*DEEPSEEK_ATTENTION, *usual()[2:]],
    ("deepseek_v3", 1): [
        *DEEPSEEK_ATTENTION,
        known(
            "post_attention_layernorm",
            "mlp.gate mlp.shared_experts.gate_proj mlp.shared_experts.up_proj " + each_expert("mlp.experts"), 64,
        ),
        gated("mlp.shared_experts", 64), *experts("mlp.experts", 64),
    ],
}  # fmt: skip

NO_PASSAGE = "do not pass a scale through"
NO_PRODUCER = "not the channel-wise output of one layer"
# (producer, one of the consumers, part of the reason); nothing elsewhere
REJECTED: dict[str | tuple[str, int], list[tuple[str | None, str, str]]] = {
    "gpt_neox": [("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", NO_PASSAGE)],
    "bloom": [("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", NO_PASSAGE)],
    "falcon": [("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", NO_PASSAGE)],
    "gpt2": [("mlp.c_fc", "mlp.c_proj", NO_PASSAGE)],
    "gptj": [("mlp.fc_in", "mlp.fc_out", NO_PASSAGE)],
    "starcoder2": [("mlp.c_fc", "mlp.c_proj", NO_PASSAGE)],
    "phi": [("mlp.fc1", "mlp.fc2", NO_PASSAGE)],
    "nemotron": [("mlp.up_proj", "mlp.down_proj", NO_PASSAGE)],  # ReLU squared
    "olmo": [
        ("input_layernorm", "self_attn.q_proj", "the norm has no weight"),
        ("post_attention_layernorm", "mlp.gate_proj", "the norm has no weight"),
    ],
    "olmo2": [(None, "self_attn.q_proj", NO_PRODUCER), (None, "mlp.gate_proj", NO_PRODUCER)],
    "gpt_oss": [  # its gate and up are clamped, and up has 1 added
        (f"mlp.experts.{index}.gate_up_proj", f"mlp.experts.{index}.down_proj", NO_PASSAGE) for index in range(4)
    ],
}  # fmt: skip


def model_and_block(case: str | tuple[str, int]) -> tuple[str, int]:
    return (case, 1) if isinstance(case, str) else case
