"""llama.cpp computes with GGUF files that its own converter laid out what we measured, architecture by architecture.

Tiny models with SmolLM2's tokenizer: random weights, so that another order of rows, heads or experts would give another
perplexity altogether. It needs ``make consumers``; ``make test-all`` runs this.
"""

import json
from dataclasses import replace

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

from quantcore.checkpoint.headers import read_local
from quantcore.config import presets
from quantcore.engine.calibration.imatrix import in_file
from quantcore.engine.containers.gguf import places_of
from tests.support.consumers import TOLERANCE, check, export_all
from tests.support.converted import MODELS, with_tokenizer_of
from tests.support.gguf import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(smollm2, tmp_path, name, agrees):
    settings = {"tie_word_embeddings": False} | MODELS[name]
    model = with_tokenizer_of(smollm2, tmp_path / "model", model_type=name, dtype=torch.float32, **settings)
    config = replace(presets.resolve("gguf_q4_1"), exclude=("*.v_proj",))
    results, windows = export_all(model, {"one": config}, ("gguf",), tmp_path)
    artifact, summary = results["one"]
    report = json.loads((artifact / "report.json").read_text())
    assert not [warning for warning in report["warnings"] if "in place of codes" in str(warning)]
    output = check("llamacpp", "check_llamacpp.py", artifact / "model.gguf", windows)
    agrees(
        "llama.cpp", "gguf", "gguf_q4_1", output["perplexity"], summary["perplexity_after"], TOLERANCE,
        f"tiny {name}", name,
    )  # fmt: skip


def test_an_importance_matrix_has_the_columns_of_the_file(smollm2, tmp_path):
    """Where heads of values share a key the converter moves columns: mean squares of inputs must go with them."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16}
    settings = {**MODELS["qwen3_5_text"], **heads, "dtype": torch.float32}
    model = with_tokenizer_of(smollm2, tmp_path / "model", model_type="qwen3_5_text", **settings)
    run(model, tmp_path / "out", presets.resolve("gguf_q8_0", exclude=("*out_proj",)))
    headers, name = read_local(model), "model.layers.0.linear_attn.out_proj.weight"
    [place] = places_of(headers.config, headers.tensors)[name]
    given = load_file(model / "model.safetensors")[name]
    [stored] = [each for each in GGUFReader(tmp_path / "out/model.gguf").tensors if each.name == place.name]
    values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
    moved = torch.stack([in_file(row, place) for row in given])
    assert place.moved_heads == (2, 2) and not torch.allclose(values, given, rtol=0.01)
    torch.testing.assert_close(values, moved, rtol=0.01, atol=1e-6)


def test_the_experts_of_gpt_oss_in_mxfp4(smollm2, tmp_path, agrees):
    """As llama.cpp's own mix for mixtures has it: stacks of experts in MXFP4, and other matrices in Q8_0."""
    model = with_tokenizer_of(
        smollm2, tmp_path / "model", model_type="gpt_oss", tie_word_embeddings=False, dtype=torch.float32
    )
    results, windows = export_all(model, {"one": presets.resolve("MXFP4_MOE")}, ("gguf",), tmp_path)
    artifact, summary = results["one"]
    [file] = artifact.glob("*.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert {types[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {"MXFP4"}
    assert types["blk.1.attn_q.weight"] == types["token_embd.weight"] == "Q8_0"
    output = check("llamacpp", "check_llamacpp.py", file, windows)
    agrees(
        "llama.cpp", "gguf", "MXFP4_MOE", output["perplexity"], summary["perplexity_after"], TOLERANCE, "tiny gpt_oss",
        "gpt_oss",
    )  # fmt: skip
