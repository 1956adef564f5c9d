"""llama.cpp computes with GGUF files that its own converter laid out what we measured, architecture by architecture.

Tiny models with SmolLM2's tokenizer: random weights, so that another order of rows, heads or experts would give another
perplexity altogether. It needs ``make consumers``; ``make test-all`` runs this.
"""

import json
from dataclasses import replace

import pytest
import torch

from quantcore.config import presets
from tests.support.consumers import TOLERANCE, check, export_all
from tests.support.converted import MODELS, with_tokenizer_of

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
