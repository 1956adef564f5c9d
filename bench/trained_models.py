"""``python -m bench.trained_models FOLDER``: train small models of several families from scratch, for measurements.

Random weights say nothing about a default: their outputs are noise, and no direction of an input matters more than
another. These models are trained on the source of Python's standard library, which every machine has, until they
predict it well; the rest of the machine's text (``builtin``, WikiText) is for calibration and held-out measurements.
Each takes a quarter of an hour of two cores or more (``--steps``: less). A family that exists in FOLDER already is not
trained again.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB, END = 4096, "<|end|>"
BATCH, SEQ_LEN = 16, 256
PEAK_RATE, WARM_UP = 2e-3, 0.05
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0}
GQA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[PretrainedConfig, int]] = {
    "qwen3": (Qwen3Config(hidden_size=256, intermediate_size=768, num_hidden_layers=6, **GQA, **COMMON), 800),
    "gemma3": (
        Gemma3TextConfig(
            hidden_size=256, intermediate_size=768, num_hidden_layers=6, sliding_window=128, query_pre_attn_scalar=32,
            pad_token_id=0, **GQA, **COMMON,
        ),
        800,
    ),
    "neox": (
        GPTNeoXConfig(
            hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
            tie_word_embeddings=False, **COMMON,
        ),
        800,
    ),
    "mixture": (
        Qwen3MoeConfig(
            hidden_size=192, intermediate_size=384, moe_intermediate_size=64, num_experts=128, num_experts_per_tok=8,
            num_hidden_layers=4, norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.002,
            **GQA, **COMMON,
        ),
        800,
    ),
}  # fmt: skip
"""Family -> its config, and the number of steps that it is trained for."""


def library_text() -> Iterator[str]:
    """Yield the source files of the standard library, without its tests."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if not {"test", "tests", "idlelib", "site-packages", "lib2to3"} & set(file.parts):
            yield file.read_text("utf-8", "replace")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that was trained on ``texts``."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(texts, vocab_size=VOCAB, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, bos_token=END, eos_token=END, pad_token=END)


def train(config: PretrainedConfig, stream: torch.Tensor, num_steps: int, name: str) -> PreTrainedModel:
    """Return a model of ``config`` trained on random windows of ``stream`` [tokens], with AdamW in float32."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    warm_up = max(1, int(WARM_UP * num_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    )
    draw, started = torch.Generator().manual_seed(0), time.monotonic()
    for step in range(num_steps):
        starts = torch.randint(len(stream) - SEQ_LEN - 1, (BATCH,), generator=draw)
        tokens = torch.stack([stream[start : start + SEQ_LEN + 1] for start in starts.tolist()])
        output = model(input_ids=tokens[:, :-1])
        loss = functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss + getattr(config, "router_aux_loss_coef", 0) * getattr(output, "aux_loss", 0)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == num_steps - 1:
            print(f"{name} {step}/{num_steps}: loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="one folder is made in it for each family")
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument("--steps", type=int, help="instead of the family's own number")
    options = parser.parse_args()
    texts = list(library_text())
    tokenizer = make_tokenizer(texts)
    stream = torch.tensor([token for text in texts for token in (*tokenizer(text)["input_ids"], 0)])
    print(f"{len(stream)} tokens")
    for family in options.families:
        config, num_steps = FAMILIES[family]
        if not (options.folder / family).exists():
            model = train(config, stream, options.steps or num_steps, family)
            tokenizer.save_pretrained(options.folder / family)
            model.bfloat16().save_pretrained(options.folder / family)


if __name__ == "__main__":
    main()
