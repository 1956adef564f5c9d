"""Programs that embed texts load a real embedding model as we quantized it, and compute what we compute.

vLLM's part needs ``make consumers``; ``make test-all`` runs them.
"""

import json
from functools import cache

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import cosine_similarity

import quantcore
from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.pipeline import job
from quantcore.export.loading import DECOMPRESSED
from tests.support import real_models
from tests.support.consumers import HAS_VNNI, NO_AVX512, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TEXTS = [
    "Quantization stores the weights of a model in fewer bits.", "The cat sat on the mat and watched the rain.",
    "How do I reset my password?", "The central bank raised interest rates by a quarter of a point.",
    "Mix the flour with the butter, then add two eggs.", "A checkpoint holds the parameters of a network.",
]  # fmt: skip
SCHEMES = ["w4a16_sym", "int8_weight_only", "int8_dynamic", "fp8", "fp8_dynamic", "nvfp4_weight_only"]
IN_VLLM = {"w4a16_sym": ("compressed_tensors", "quark", "awq"), "int8_dynamic": ("compressed_tensors", "quark")}
ROUNDED = 0.003
"""The allowed difference of mean cosines: vLLM computes in bfloat16."""


@pytest.fixture(scope="module")
def minilm():
    return real_models.minilm()


@pytest.fixture(scope="module")
def quantized(minilm, tmp_path_factory):
    """Return a function from a preset to the folder of its exports, one for each format."""
    root = tmp_path_factory.mktemp("minilm")

    @cache
    def exports_of(preset):
        exports = IN_VLLM.get(preset, ("compressed_tensors",)) + ("gptq",) * (preset == "w4a16_sym")
        size = 64 if "w4" in preset else None
        task = {
            "model_dir": str(minilm), "output_dir": str(root / preset), "export": exports,
            "config": presets.resolve(preset, group_size=size).to_dict(), "gate": "off",
            "calibration": {"num_samples": 8, "seq_len": 128}, "evaluation": {"num_windows": 2, "seq_len": 128},
        }  # fmt: skip
        job.run(Task.model_validate(task), lambda event: None)
        return {export: root / preset / (export if len(exports) > 1 else "") for export in exports}

    return exports_of


def mean_cosine(embeddings, minilm):
    return cosine_similarity(torch.as_tensor(embeddings), _embed(SentenceTransformer(str(minilm))), -1).mean().item()


def _embed(model):
    return model.encode(TEXTS, convert_to_tensor=True, device="cpu").float().cpu()


def ours(folder, minilm):
    """Embed with our own reader of the files in place of the model that the library loaded."""
    model = SentenceTransformer(str(minilm), device="cpu")
    model[0].model, _ = quantcore.load(folder)
    return mean_cosine(_embed(model), minilm)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # which is meant
@pytest.mark.parametrize("preset", SCHEMES)
def test_the_printed_lines_load_it_in_sentence_transformers(quantized, preset, minilm, agrees):
    folder = quantized(preset)["compressed_tensors"]
    names: dict = {}
    exec(DECOMPRESSED.format(path=str(folder)), names)
    theirs = mean_cosine(_embed(names["model"]), minilm)
    agrees(
        "sentence-transformers", "compressed_tensors", preset, theirs, ours(folder, minilm), ROUNDED, "MiniLM", "bert"
    )


@pytest.mark.skipif(not HAS_VNNI, reason=NO_AVX512)
@pytest.mark.parametrize("preset", list(IN_VLLM))
def test_vllm_embeds_as_we_do(quantized, preset, minilm, tmp_path, agrees):
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    exports = quantized(preset)
    found = check("vllm", "check_vllm.py", "--embed", tmp_path / "texts.json", *exports.values())
    for export in IN_VLLM[preset]:
        theirs = mean_cosine(found[str(exports[export])], minilm)
        agrees("vLLM (CPU)", export, preset, theirs, ours(exports[export], minilm), ROUNDED, "MiniLM", "bert")
    if "gptq" in exports:  # so no line for vLLM is printed: nothing in the table says that it loads BERT from GPTQ
        assert "has no attribute 'data'" in found[str(exports["gptq"])]
