"""Our reading of an architecture is held against Transformers' own forward before a job's first block."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.model.tiny_model import VOCAB_SIZE, build_tiny_model, tiny_config
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.arguments import WindowArguments
from quantcore.engine.runtime.block_capture import BlockBoundary
from quantcore.engine.verification import architecture
from quantcore.engine.verification.architecture import prove_tiny_model, prove_window
from quantcore.errors import ModelError
from quantcore.events import Warned
from quantcore.importing.model import read_model
from tests.support.jobs import task
from tests.support.models import MIXTURES, tiny_model
from tests.sweep.classes import find_class, small_config

FAMILIES = {
    "llama": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30},
    "qwen3_moe": {},
    "deepseek_v4": {
        "num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "compressed_sparse_attention"],
    },
    "gemma4_text": {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "mamba": {"num_hidden_layers": 3},
    "gpt_neox": {"num_hidden_layers": 3},
}  # fmt: skip


def config_of(model_type):
    config = AutoConfig.for_model(model_type, **FAMILIES[model_type])
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_twin_streamed_gives_what_transformers_gives(model_type):
    """Window by window, in float32: to 1e-5 of the logits."""
    found = architecture._compare_twin(json.dumps(tiny_config(config_of(model_type))))
    assert len(found["differences"]) == architecture.NUM_WINDOWS and max(found["differences"]) < 1e-5


def test_a_twin_is_small_and_keeps_what_the_config_switches():
    config = config_of("gemma4_text")
    small = tiny_config(config)
    for key in ("num_hidden_layers", "layer_types", "num_kv_shared_layers", "rms_norm_eps", "sliding_window"):
        assert small[key] == config[key]
    assert small["vocab_size"] == VOCAB_SIZE and small["hidden_size"] < config["hidden_size"] // 8
    assert sum(one.numel() for one in build_tiny_model(small).parameters()) < 2e6


def test_building_a_twin_leaves_the_random_numbers_of_a_job_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build_tiny_model(tiny_config(config_of("llama")))
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture
def deepseek(tmp_path):
    """Its blocks read token ids: what they are given differs from window to window."""
    build_tiny_model(tiny_config(config_of("deepseek_v4"))).save_pretrained(tmp_path / "model")
    return read_model(tmp_path / "model")


def last_for_all(kept, index, window):
    return kept.of_window[-1][index]


def swapped(kept, index, window):
    return kept.of_window[(window + 1) % len(kept.of_window)][index]


@pytest.mark.parametrize("mutant", [last_for_all, swapped])
def test_arguments_of_another_window_are_noticed(deepseek, monkeypatch, mutant):
    architecture._compare_twin.cache_clear()
    prove_tiny_model(deepseek, lambda event: None)
    architecture._compare_twin.cache_clear()
    monkeypatch.setattr(WindowArguments, "of", mutant)
    with pytest.raises(ModelError, match=r"'deepseek_v4' model does not match") as caught:
        prove_tiny_model(deepseek, lambda event: None)
    assert caught.value.code == "architecture_misread"
    architecture._compare_twin.cache_clear()


LATER = {
    1: "'block_states', an argument of block 2, is computed from the outputs of earlier blocks",
    6: "its head reads more than the output of the last block",
}


@pytest.mark.parametrize("every", LATER)
def test_what_is_kept_of_earlier_blocks_for_later_ones_is_the_reason(every):
    """Inkling 2 keeps the inputs of every n-th block for all blocks after it, and for its head."""
    config = small_config(find_class("Inkling2ForCausalLM")) | {"n_layers_per_attn_res_block": every}
    with pytest.raises(ModelError, match=LATER[every]) as caught:
        architecture._compare_twin(json.dumps(config))
    assert caught.value.code == "unsupported_architecture"


def test_one_window_of_the_model_itself_is_compared(tmp_path, monkeypatch):
    folder = tiny_model(tmp_path / "model", model_type="qwen3_moe", **MIXTURES["qwen3_moe"])
    prove_window(read_model(folder), BaselineCache("this"), lambda event: None)
    model = read_model(folder)
    model.headers.config["rms_norm_eps"] = 30.0  # the files and what we make of them no longer agree
    monkeypatch.setattr(architecture, "clean_config", lambda config: AutoConfig.from_pretrained(folder))
    with pytest.raises(ModelError, match="does not match Transformers"):
        prove_window(model, BaselineCache("this"), lambda event: None)


def test_layers_that_are_never_called_are_found(tmp_path):
    folder = tiny_model(tmp_path / "mamba", model_type="mamba", num_hidden_layers=2)
    assert prove_tiny_model(read_model(folder), lambda event: None) == [
        f"backbone.layers.{index}.mixer.dt_proj" for index in range(2)
    ]
    folder = tiny_model(tmp_path / "mixture", model_type="qwen3_moe", **MIXTURES["qwen3_moe"])
    assert prove_tiny_model(read_model(folder), lambda event: None) == []  # no token reaches some of the experts


def test_what_cannot_be_built_is_said(monkeypatch, tmp_path):
    folder = tiny_model(tmp_path / "model")
    monkeypatch.setattr(architecture, "build_tiny_model", lambda config, seed, kind: 1 / 0)
    architecture._compare_twin.cache_clear()
    told = []
    prove_tiny_model(read_model(folder), told.append)
    architecture._compare_twin.cache_clear()
    [warning] = told
    assert isinstance(warning, Warned) and warning.code == "architecture_not_proven"
    assert "'llama'" in warning.message and "division by zero" in warning.message


def test_how_many_values_a_block_returns_is_found_out():
    """Some models unpack two values from each block and use the first alone."""
    relay = BlockBoundary(0)

    def model():
        relay.seen = torch.zeros(1, 2, 3)
        returned = (relay.seen, *[None] * (relay.num_returned - 1)) if relay.num_returned else relay.seen
        hidden, _ = returned
        assert hidden.shape == (1, 2, 3)

    relay.run(model)
    assert relay.num_returned == 2


def test_a_model_that_never_calls_its_first_block_is_refused():
    with pytest.raises(ModelError, match="never calls the first block") as caught:
        BlockBoundary(0).run(lambda: None)
    assert caught.value.code == "unsupported_architecture"


def test_an_error_of_a_model_s_own_code_is_told_in_one_line():
    with pytest.raises(ModelError, match=r"its code fails outside the blocks \(KeyError: 'states'\)"):
        BlockBoundary(0).run(lambda: {}["states"])


def test_a_model_that_overflows_is_refused_before_the_first_block(tmp_path):
    """Gemma 3 in float16: hidden states grow beyond 65,504, which bfloat16 holds."""
    folder = tiny_model(tmp_path / "model", dtype=torch.float16)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("up_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 300
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for dtype, is_finite in ((torch.float16, False), (torch.bfloat16, True)):
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(torch.arange(24)[None]).logits
        assert bool(logits.isfinite().all()) == is_finite
    events = []
    with pytest.raises(ModelError, match="overflows in float16") as caught:
        run(task(folder, tmp_path / "out", "int8_weight_only"), events.append)
    assert caught.value.code == "float_overflow" and "dtype='bfloat16'" in caught.value.hint
    assert {event.phase for event in events if hasattr(event, "phase")} <= {"resolve", "plan"}
