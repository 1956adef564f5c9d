"""A random Llama of any depth, written tensor by tensor: making it needs no more memory than one tensor."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from quantcore.checkpoint.layout import TensorLayout
from quantcore.tensors.sink import Sink

HEADS, KV_HEADS = 32, 4
VOCAB = 512
TINY_LLAMA = (2048, 5632)
"""The hidden and the inner size of the 1.1B model."""

Widths = tuple[int, int]


def write_random_model(folder: Path, *, num_blocks: int, widths: Widths = TINY_LLAMA, vocab_size: int = VOCAB) -> int:
    """Write a bfloat16 Llama with a tokenizer of ``vocab_size`` tokens, and return the weights' size in bytes."""
    folder.mkdir(parents=True)
    LlamaConfig(
        hidden_size=widths[0], intermediate_size=widths[1], num_hidden_layers=num_blocks, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=vocab_size, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    _tokenizer(vocab_size).save_pretrained(folder)
    layouts = {name: TensorLayout("BF16", shape) for name, shape in _shapes(num_blocks, widths, vocab_size).items()}
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


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: that of the tests, with pairs of its tokens merged until there are enough."""
    from tests.support.models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for left, right in itertools.product(sorted(vocabulary, key=vocabulary.__getitem__)[1:], repeat=2):
        if len(vocabulary) >= vocab_size:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right])
    larger = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(
        tokenizer_object=larger, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token
    )


def block_bytes(widths: Widths) -> int:
    """Return the size of one decoder block in bytes."""
    return 2 * sum(math.prod(shape) for name, shape in _shapes(1, widths).items() if name.startswith("model.layers."))


def _shapes(num_blocks: int, widths: Widths, vocab_size: int = VOCAB) -> dict[str, tuple[int, ...]]:
    hidden, inner = widths
    head_dim = hidden // HEADS
    block = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (KV_HEADS * head_dim, hidden),
        "self_attn.v_proj": (KV_HEADS * head_dim, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(num_blocks):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in block.items()}
    return shapes
