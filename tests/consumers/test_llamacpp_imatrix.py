"""llama.cpp reads the importance matrices that we write, and makes better files with them than without.

It needs ``make consumers``, and the C++ compiler that this has used; ``make test-all`` runs this.
"""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig
from quantcore.engine.commands.imatrix import windows_of
from tests.support.consumers import run_in
from tests.support.gguf import WIDE, run
from tests.support.models import MIXTURES, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

IQ2_XXS, Q2_K = 19, 10  # llama.cpp's numbers of these mixes; the first is refused without an importance matrix


def loud_model(folder, **settings):
    """A model some of whose channels are much louder than others, as those of trained models are."""
    model, generator = tiny_model(folder, dtype=torch.float32, **settings), torch.Generator().manual_seed(0)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor *= torch.exp(1.5 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def divergence(original, file, ids_NT):
    """The mean KL divergence of the file from the original, in nats per token."""
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        before, after = (torch.log_softmax(model(ids_NT).logits, -1) for model in (original, quantized))
    return (before.exp() * (before - after)).sum(-1).mean().item()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_llama_cpp_quantizes_with_it(tmp_path, quantize_with_imatrix, name):
    settings = MIXTURES.get(name, {}) | WIDE
    model = loud_model(tmp_path / "model", model_type=name, **settings)
    matrix = tmp_path / "im.gguf"
    assert main(["imatrix", str(model), "-o", str(matrix), "--num_calib_data", "16", "--seq_len", "64"]) == 0
    kept = presets.resolve("gguf_q8_0", exclude=("*.layers.*",), token_embedding_type="q8_0")
    run(model, tmp_path / "float", kept)
    plain = tmp_path / "plain.gguf"
    _, printed = run_in("llamacpp", "quantize_llamacpp.py", tmp_path / "float/model.gguf", "Q2_K", plain)
    assert plain.exists(), printed[-3000:]
    better, lowest = tmp_path / "better.gguf", tmp_path / "lowest.gguf"
    done = quantize_with_imatrix(matrix, tmp_path / "float/model.gguf", better, Q2_K)
    assert done.returncode == 0 and "16 chunks of 64" in done.stdout, done.stderr[-3000:]
    assert "did not find weights for blk" not in done.stderr
    done = quantize_with_imatrix(matrix, tmp_path / "float/model.gguf", lowest, IQ2_XXS)
    assert done.returncode == 0 and lowest.exists(), done.stderr[-3000:]
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids_NT = windows_of(model, CalibrationConfig(num_samples=16, seq_len=64, seed=1))
    without, with_it = (divergence(original, file, ids_NT) for file in (plain, better))
    assert math.isfinite(with_it) and with_it < without
