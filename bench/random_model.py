"""A random Llama of any depth, written tensor by tensor: making it needs no more memory than one tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from quantcore.checkpoint.layout import TensorLayout
from quantcore.checkpoint.sink import Sink

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 2048, 5632, 32, 4
VOCAB = 512


def write_random_model(folder: Path, *, num_blocks: int) -> int:
    """Write a bfloat16 model with TinyLlama-1.1B's layer shapes and a small vocabulary; the weights' size in bytes."""
    from tests.factories import tiny_tokenizer

    folder.mkdir(parents=True)
    LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=num_blocks, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCAB, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    tiny_tokenizer().save_pretrained(folder)
    layouts = {name: TensorLayout("BF16", shape) for name, shape in _shapes(num_blocks).items()}
    sink = Sink(folder, layouts)
    generator = torch.Generator().manual_seed(0)
    for name, layout in layouts.items():
        spread = layout.shape[-1] ** -0.5
        values = (
            torch.randn(layout.shape, generator=generator) * spread
            if len(layout.shape) == 2
            else torch.ones(layout.shape)
        )
        sink.write(name, values.bfloat16())
    sink.finish()
    return sum(layout.num_bytes for layout in layouts.values())


def _shapes(num_blocks: int) -> dict[str, tuple[int, ...]]:
    head_dim = HIDDEN // HEADS
    block = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for index in range(num_blocks):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in block.items()}
    return shapes
