"""The streamed model gives the logits that Transformers gives with the whole model in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bench.random_model import write_random_model
from quantcore.checkpoint.blocks import Blocks
from quantcore.checkpoint.headers import read_local
from quantcore.engine.model.parameter_names import place_tensors
from quantcore.engine.model.skeleton import build_skeleton, find_block_lists
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.errors import ModelError
from quantcore.tensors.source import Source
from tests.support.models import MIXTURES, SHAPE, tiny_model
from tests.support.streamed import streamed
from tests.sweep.classes import build, find_class, save

ROOT = Path(__file__).parents[4]

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
    "gpt_neox": {"tie_word_embeddings": False},
    "bloom": {},  # its blocks return a tuple
    **MIXTURES,
}  # fmt: skip


def run(model, windows):
    hidden = model.embed(windows)
    for index in range(model.num_blocks):
        with model.block(index) as block:
            model.run_block(block, index, hidden)
    with model.head() as logits:
        return torch.cat([logits(state) for state in hidden.states])


def assert_same_logits(folder, dtype=torch.float32):
    windows = torch.randint(1, 500, (3, 40), generator=torch.Generator().manual_seed(1))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad(), matmul_precision(torch.device("cpu")):  # rounded alike: a router may choose otherwise else
        expected = torch.cat([whole(window[None]).logits for window in windows])
    got = run(streamed(folder, dtype), windows)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_logits_as_the_whole_model(name, tmp_path):
    overrides = {"model_type": name.removesuffix("_untied"), **ARCHITECTURES[name]}
    assert_same_logits(tiny_model(tmp_path / "model", dtype=torch.float32, **overrides))


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_a_config_that_asks_for_more_than_logits_is_run_all_the_same(name, tmp_path):
    """Fine-tuned mixtures often keep output_router_logits; Transformers would then compute a loss of them."""
    overrides = {"model_type": name, **ARCHITECTURES[name]}
    folder = tiny_model(tmp_path / "model", dtype=torch.float32, output_hidden_states=True, **overrides)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    assert_same_logits(folder)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("llama", "model."), ("bloom", "transformer.")])
def test_checkpoints_of_the_bare_model_have_no_prefix(name, prefix, tmp_path):
    """GPT-2 on the Hub: ``h.0.attn.c_attn.weight``, where the causal language model says ``transformer.h.0...``."""
    folder = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **ARCHITECTURES[name])
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith(prefix) for name in tensors)
    save_file({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert_same_logits(folder)


def test_a_checkpoint_with_the_model_s_own_names_needs_no_renaming():
    """Laguna's table would make ``shared_experts..gate_proj`` of ``shared_experts.gate_proj``: its dot is any sign."""
    with torch.device("meta"):
        config = AutoConfig.for_model("laguna", **SHAPE, num_attention_heads_per_layer=[4] * 3, num_experts=4)
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name in model.state_dict() if ".experts." not in name]
    assert any(".shared_experts." in name for name in names)
    assert place_tensors(model, names) == {name: name for name in names}


_HYBRID = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4}


def test_blocks_that_share_weights_are_refused_for_that_reason(tmp_path):
    overrides = {**_HYBRID, "mamba_ngroups": 1, "n_mamba_heads": 4, "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]}
    folder = tiny_model(tmp_path / "model", model_type="zamba2", **overrides)
    with pytest.raises(ModelError, match=r"Blocks of this model share weights: 'model\.layers\.3\.") as caught:
        streamed(folder)
    assert caught.value.code == "unsupported_architecture" and "--file2file_quantization" in caught.value.hint


@pytest.mark.parametrize("model_type", ["wav2vec2", "vit"])
def test_a_class_that_reads_no_text_is_named_in_short(model_type):
    with pytest.raises(ModelError, match=f"no text model of type '{model_type}'") as caught:
        build_skeleton({"model_type": model_type}, torch.float32)
    assert "--file2file_quantization" in caught.value.hint and len(str(caught.value)) < 300


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save(build(find_class("LlavaForConditionalGeneration")), folder)
    return folder


def test_towers_take_no_memory_and_are_loaded_when_they_run(llava):
    model = streamed(llava, torch.bfloat16)
    tower = model.model.model.vision_tower
    ids_NT = torch.arange(8)[None]
    with model.head():
        assert {parameter.untyped_storage().nbytes() for parameter in tower.parameters()} == {2}  # a hole each
        assert all(parameter.isnan().all() for parameter in tower.parameters())
        size = model.model.config.vision_config.image_size
        tower(torch.zeros(1, 3, size, size, dtype=torch.bfloat16))
        assert not any(parameter.isnan().any() for parameter in tower.parameters())
    assert all(parameter.is_meta for parameter in tower.parameters())
    assert model.embed(ids_NT).states[0].shape[:2] == (1, 8)


def test_the_blocks_are_found_beside_another_list_of_that_length():
    model = torch.nn.Module()
    model.towers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    placed = {"h.0.weight": "layers.0.weight"}
    found, [modules] = find_block_lists(model, placed, Blocks((("h.", 3),)))
    assert (found.lists, modules) == ((("layers.", 3),), model.layers)
    with pytest.raises(ModelError, match="elsewhere"):
        find_block_lists(model, placed, Blocks((("h.", 2),)))


def test_the_head_is_not_read_before_it_is_needed(tmp_path):
    folder = tiny_model(tmp_path / "model", model_type="gpt_neox", tie_word_embeddings=False)
    model, read = streamed(folder), []
    model._read = lambda name, old=model._read: (read.append(name), old(name))[1]
    model.embed(torch.ones(1, 8, dtype=torch.long))
    assert "gpt_neox.embed_in.weight" in read and "embed_out.weight" not in read
    with model.head():
        assert "embed_out.weight" in read


def test_the_system_fetches_the_next_block_while_one_runs(tmp_path, monkeypatch):
    """It is told the bytes of all its tensors, and no others."""
    headers = read_local(tiny_model(tmp_path / "model", model_type="mixtral", **MIXTURES["mixtral"]))
    source, told = Source(tmp_path / "model", headers.tensors), []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: told.append((begin, size, advice)))
    model = streamed(tmp_path / "model")
    model._expect = source.expect
    for index in range(3):
        with model.block(index):
            start = f"model.layers.{index + 1}."
            next_block = {(one.begin, one.num_bytes) for name, one in headers.tensors.items() if name.startswith(start)}
            assert sorted(told) == sorted((*place, os.POSIX_FADV_WILLNEED) for place in next_block)
            assert bool(told) == (index < 2)
        told.clear()


def test_buffers_of_the_checkpoint_are_read_and_stay_float32(tmp_path):
    """DeepSeek's router bias: a buffer, stored, and float32 also in a bfloat16 model. It decides who gets a token."""
    folder = tiny_model(tmp_path / "model", model_type="deepseek_v3", **MIXTURES["deepseek_v3"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = torch.tensor([0.3001, -0.2, 0.1, 0.0])
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(streamed(folder, torch.bfloat16).model.get_buffer(name), tensors[name])
    assert_same_logits(folder, torch.bfloat16)


def test_a_layer_is_found_by_its_name_in_the_checkpoint(tmp_path):
    model = streamed(tiny_model(tmp_path / "model", model_type="mixtral", **MIXTURES["mixtral"]))
    with model.block(1) as block:
        found = model.find_module("model.layers.1.block_sparse_moe.experts.3.w2")
        assert found is block.get_submodule("mlp.experts.3.w2") and found.weight.shape == (64, 128)
    with pytest.raises(ModelError, match=r"without the layer model\.layers\.1\.mlp\.gate") as caught:
        model.find_module("model.layers.1.mlp.gate")
    assert caught.value.code == "unsupported_layer"


def test_a_model_that_computes_between_its_blocks_is_refused(tmp_path):
    """What is done there would be missed, and nothing would look wrong."""
    model = streamed(tiny_model(tmp_path / "model"))
    block = model.model.get_submodule(model.block_name(1))
    block.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1, *inputs[1:]))
    with pytest.raises(ModelError, match="between its decoder blocks"):
        model.embed(torch.ones(1, 8, dtype=torch.long))


NO_CHAINS = {
    "XLMWithLMHeadModel": r"alternate between the lists 'transformer\.ffns\.\*' and 'transformer\.attentions\.\*'",
    "Pop2PianoForConditionalGeneration": "The encoder of this model takes audio, not embeddings",
    "AlbertForMaskedLM": "runs the first block more than once",
}


@pytest.mark.parametrize("name", NO_CHAINS)
def test_blocks_that_are_no_chain_are_refused_with_the_reason(name, tmp_path):
    save(build(find_class(name)), tmp_path)
    with pytest.raises(ModelError, match=NO_CHAINS[name]) as caught:
        streamed(tmp_path).embed(torch.ones(1, 8, dtype=torch.long))
    assert caught.value.code == "unsupported_architecture" and "--file2file_quantization" in caught.value.hint


def test_a_bias_of_the_head_with_two_names_is_read_again(tmp_path):
    """LUKE's; the first run, which needs no head, ties the two."""
    save(build(find_class("LukeForMaskedLM")), tmp_path)
    model = streamed(tmp_path)
    hidden = model.embed(torch.ones(1, 8, dtype=torch.long))
    with model.head() as logits:
        assert logits(hidden.states[0]).isfinite().all()


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
from tests.support.streamed import streamed
from tests.sweep.classes import build, find_class, save

model = streamed(Path(sys.argv[1]), torch.bfloat16)
model.embed(torch.ones(2, 64, dtype=torch.long))
for index in range(5):
    with model.block(index):
        pass
    print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_peak_is_that_of_this_process_alone():
    """A parent that held much memory before it started us does not count; what we hold for a moment does."""
    code = (
        "from quantcore.engine.runtime.devices import peak_memory_bytes as peak\n"
        "before = peak(); held = bytearray(300 << 20); held[::4096] = b'1' * len(held[::4096]); del held\n"
        "print(before, peak())"
    )
    held = bytearray(1200 << 20)
    held[::4096] = b"1" * len(held[::4096])
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = map(int, printed.split())
    assert before < 1000 << 20 and after - before > 250 << 20


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    model = streamed(tiny_model(tmp_path / "model", vocab_size=300))
    with pytest.raises(
        ModelError, match=r"produces the token 300, but the model has embeddings for 300 tokens"
    ) as raised:
        model.embed(torch.tensor([[0, 299], [300, 1]]))
    assert raised.value.code == "tokenizer_mismatch"
