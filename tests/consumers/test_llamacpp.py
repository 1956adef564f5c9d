"""llama.cpp loads the GGUF files that we export, cuts texts into the same tokens, and computes what we measured.

It needs ``make consumers`` (an environment of its own) and a real trained model; ``make test-all`` runs this.
"""

from dataclasses import replace

import pytest
import torch

from quantcore.config import presets
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.export.gguf.splitting import split_gguf
from tests.support.consumers import TOLERANCE, check, export_all
from tests.support.models import MIXTURES, tiny_model
from tests.support.tokenizers import CUTS, byte_level, saved, sentencepiece

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TEXT = "The cat's 12345 dogs?!\n\n  Ünïcode 東京  and\ttabs; I'll SAY it <|im_start|> 3.14"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
SIXTEEN = {"query_pre_attn_scalar": 16, "sliding_window": 32}
LLAMA3 = {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "mistral": {},
    "qwen2": {"vocab_size": 517, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
    "gemma2": {**SIXTEEN, "final_logit_softcapping": 5.0},
    "gemma3_text": {**SIXTEEN, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"tie_word_embeddings": False},
    "mixtral": MIXTURES["mixtral"],
    "qwen3_moe": {**MIXTURES["qwen3_moe"], "norm_topk_prob": True},
}


def one_export(model, config, folder):
    results, windows = export_all(model, {"one": config}, ("gguf",), folder)
    artifact, summary = results["one"]
    return artifact / "model.gguf", summary["perplexity_after"], windows


@pytest.mark.parametrize("preset", ["gguf_q4_1", "gguf_q8_0", "gguf_q4_k"])
def test_a_real_model(smollm2, tmp_path, preset, agrees):
    """Q4_K on rows of 576 and 1536: most layers fall back to Q5_0, the others are super-blocks."""
    file, perplexity, windows = one_export(smollm2, presets.resolve(preset), tmp_path)
    output = check("llamacpp", "check_llamacpp.py", file, windows, TEXT)
    assert "Paris" in output["texts"][0]
    agrees("llama.cpp", "gguf", preset, output["perplexity"], perplexity, TOLERANCE)
    assert output["ids"] == load_tokenizer(smollm2)(TEXT)["input_ids"]


@pytest.mark.parametrize(
    "preset",
    [
        "gguf_iq2_xxs",
        "gguf_iq2_xs",
        "gguf_iq2_s",
        "gguf_iq3_xxs",
        "gguf_iq3_s",
        "gguf_q2_k",
        "gguf_q3_k",
        "gguf_iq4_xs",
        "gguf_iq4_nl",
        "gguf_q4_k",
        "gguf_q5_k",
        "gguf_q6_k",
        "gguf_q4_0",
        "gguf_q5_0",
        "gguf_q5_1",
        "gguf_iq1_s",
        "gguf_iq1_m",
        "gguf_tq1_0",
        "gguf_tq2_0",
        "gguf_mxfp4",
        "gguf_nvfp4",
    ],
)
def test_every_type_of_block(tmp_path, preset, agrees):
    model = tiny_model(tmp_path / "model", rank=16, dtype=torch.float32, **WIDE)
    file, perplexity, windows = one_export(model, presets.resolve(preset), tmp_path)
    output = check("llamacpp", "check_llamacpp.py", file, windows)
    agrees("llama.cpp", "gguf", preset, output["perplexity"], perplexity, TOLERANCE, "tiny llama")


def test_a_split_file(smollm2, tmp_path):
    """llama.cpp finds the other parts by the first one, and computes the same to the last bit."""
    file, _, windows = one_export(smollm2, presets.resolve("gguf_q4_0"), tmp_path)
    whole = check("llamacpp", "check_llamacpp.py", file, windows, TEXT)
    parts = split_gguf(file, tmp_path, 20_000_000)
    assert len(parts) > 3
    assert check("llamacpp", "check_llamacpp.py", parts[0], windows, TEXT) == whole


def test_a_mix_of_types(tmp_path, agrees):
    """As a goal chooses them, layer by layer."""
    model = tiny_model(tmp_path / "model", rank=16, dtype=torch.float32, **WIDE)
    own = {"*down_proj": "gguf_q4_k", "*v_proj": "gguf_q8_0", "*o_proj": "gguf_q5_1", "*gate_proj": "gguf_q5_k"}
    layers = {pattern: presets.resolve(preset).global_quant_config for pattern, preset in own.items()}
    config = replace(presets.resolve("gguf_q6_k"), layer_quant_config=layers, exclude=("*k_proj",))
    file, perplexity, windows = one_export(model, config, tmp_path)
    output = check("llamacpp", "check_llamacpp.py", file, windows)
    agrees(
        "llama.cpp",
        "gguf",
        "mix of gguf types",
        output["perplexity"],
        perplexity,
        TOLERANCE,
        "tiny llama",
        config=config,
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(tmp_path, name, agrees):
    """Random weights: another order of rows, norms or experts would give another perplexity altogether."""
    model = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **MODELS[name])
    config = replace(presets.resolve("gguf_q8_0"), exclude=("*.v_proj",))
    file, perplexity, windows = one_export(model, config, tmp_path)
    output = check("llamacpp", "check_llamacpp.py", file, windows)
    agrees("llama.cpp", "gguf", "gguf_q8_0", output["perplexity"], perplexity, TOLERANCE, f"tiny {name}", name)


@pytest.mark.parametrize("name", ["sentencepiece", *(name for name in CUTS if name != "default")])
def test_texts_are_cut_alike(tmp_path, name):
    model = tiny_model(tmp_path / "model", vocab_size=300)
    tokenizer = (
        sentencepiece(added=()) if name == "sentencepiece" else byte_level(CUTS[name], ignore_merges=name == "tekken")
    )
    saved(model, tokenizer, bos_token="<s>", eos_token="</s>")
    file, _, windows = one_export(model, presets.resolve("gguf_q8_0"), tmp_path)
    output = check("llamacpp", "check_llamacpp.py", file, windows, TEXT)
    assert output["ids"] == load_tokenizer(model)(TEXT)["input_ids"]
