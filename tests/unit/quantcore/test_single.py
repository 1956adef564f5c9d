"""The streamed model gives the logits that Transformers gives with the whole model in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.random_model import write_random_model
from quantcore.checkpoint.headers import read_local
from quantcore.checkpoint.source import Source
from quantcore.errors import ModelError
from quantcore.plan import find_blocks
from quantcore.runtime.single import StreamedModel
from tests.factories import tiny_model

ROOT = Path(__file__).parents[3]

ARCHITECTURES = {
    "llama": {},
    "llama_untied": {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {
        "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "olmo2": {},
    "phi3": {"tie_word_embeddings": False},
    "cohere": {"logit_scale": 0.25},
    "stablelm": {},
    "starcoder2": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "phi": {"tie_word_embeddings": False},
}  # fmt: skip


def streamed(folder, dtype=torch.float32):
    headers = read_local(folder)
    prefix, num_blocks = find_blocks(headers.tensors, headers.config)
    source = Source(folder, headers.tensors)
    return StreamedModel(
        headers.config, source.read, set(headers.tensors), prefix, num_blocks, dtype, torch.device("cpu")
    )


def run(model, windows):
    hidden = model.embed(windows)
    for index in range(len(model.blocks)):
        with model.block(index) as block:
            model.run_block(block, index, hidden)
    with model.head() as logits:
        return torch.cat([logits(state) for state in hidden.states])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_logits_as_the_whole_model(name, tmp_path):
    overrides = {"model_type": name, **ARCHITECTURES[name]}
    folder = tiny_model(tmp_path / "model", dtype=torch.float32, **overrides)
    windows = torch.randint(1, 500, (3, 40), generator=torch.Generator().manual_seed(1))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([whole(window[None]).logits for window in windows])
    got = run(streamed(folder), windows)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_blocks_hold_no_weights_before_and_after(tmp_path):
    model = streamed(tiny_model(tmp_path / "model"))

    def held():
        return [name for name, parameter in model.model.named_parameters() if not parameter.is_meta]

    assert held() == []
    with model.block(1):
        names = held()
        assert names and all(name.startswith("model.layers.1.") for name in names)
    hidden = model.embed(torch.ones(1, 8, dtype=torch.long))
    with model.head() as logits:
        logits(hidden.states[0])
        assert "model.embed_tokens.weight" in held()
    assert held() == []


def test_a_missing_tensor_is_named(tmp_path):
    model = streamed(tiny_model(tmp_path / "model", tie_word_embeddings=False))
    model._read.__self__.tensors.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"), model.block(1):
        pass


WALK = """
import os, sys
from pathlib import Path
import torch
from tests.unit.quantcore.test_single import streamed

model = streamed(Path(sys.argv[1]), torch.bfloat16)
model.embed(torch.ones(2, 64, dtype=torch.long))
for index in range(5):
    with model.block(index):
        pass
    print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
"""


def test_memory_does_not_grow_with_the_depth(tmp_path):
    """In a fresh process that loads block after block: freed weights go back to the system."""
    write_random_model(tmp_path / "model", num_blocks=5)
    result = subprocess.run(
        [sys.executable, "-c", WALK, tmp_path / "model"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    sizes = [int(line) for line in result.stdout.split()]
    block_bytes = 88_000_000
    assert len(sizes) == 5
    assert sizes[-1] - sizes[0] < block_bytes, sizes
