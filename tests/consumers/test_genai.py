"""ONNX Runtime GenAI runs our ONNX folders as they are: our logits, our perplexity, our tokens.

It needs ``make consumers`` (an environment of its own); ``make test-all`` runs it.
"""

import json

import numpy
import pytest
import torch
from transformers import AutoTokenizer

import quantcore
from quantcore.config import presets
from tests.support.consumers import TOLERANCE, check, export_all
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLOAT_INPUTS = ("w4a16", "w4a16_sym", "int8_weight_only")
PRESETS = (*FLOAT_INPUTS, "int8", "int8_static", "int8_dynamic", "fp8", "fp8_dynamic")
SAME, MOVED_CODES = 1e-4, 0.02
"""Of perplexities: sums in another order; and where inputs are rounded, that noise moves a few to the next code."""
MODELS = {
    "bloom": {"n_head": 4, "layer_norm_epsilon": 1e-5},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32, "final_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 32, "head_dim": 32},
    "gpt_neox": {},
    "olmo2": {},
    "phi3": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "smollm3": {},
}
TEXTS = ["The capital of France is", "Grüße aus Köln! 12 * 3 = 36\n\tnew line", "  two spaces"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Every scheme of a tiny Llama in float32, with our perplexity, and what GenAI makes of it."""
    folder = tmp_path_factory.mktemp("exports")
    model = tiny_model(folder / "model", rank=16, dtype=torch.float32, max_position_embeddings=512)
    configs = {name: presets.resolve(name) for name in PRESETS}
    results, windows = export_all(model, configs, ("onnx",), folder)
    return results, windows, check("genai", "check_genai.py", windows, *(found for found, _ in results.values()))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_scheme_of_a_tiny_llama(exports, preset, agrees):
    """With what ``genai_config.json`` says, and no option of ours: by default int8 inputs are rounded otherwise."""
    results, _, found = exports
    folder, summary = results[preset]
    theirs, allowed = found[str(folder)], SAME if preset in FLOAT_INPUTS else MOVED_CODES
    ours = summary["perplexity_after"]
    agrees("ONNX Runtime GenAI", "onnx", preset, theirs["perplexity"], ours, allowed, "tiny llama")


@pytest.mark.parametrize("preset", FLOAT_INPUTS)
def test_logits_and_answers_are_ours(exports, preset, tmp_path):
    """An answer is made token by token with the cache; the logits come from one call."""
    results, windows, found = exports
    folder, _ = results[preset]
    check("genai", "check_genai.py", "--logits", windows, folder, tmp_path / "logits.npy")
    model, _ = quantcore.load(folder)
    ids = torch.tensor(json.loads(windows.read_text())[:1])
    with torch.inference_mode():
        ours = model(ids[:, :-1]).logits[0]
        answer = model.generate(ids[:, :8], do_sample=False, max_new_tokens=16)[0, 8:].tolist()
    theirs = torch.from_numpy(numpy.load(tmp_path / "logits.npy"))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4 * ours.abs().max().item())
    assert found[str(folder)]["greedy"] == answer


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(tmp_path, name, agrees):
    model = tiny_model(tmp_path / "model", model_type=name, dtype=torch.float32, **MODELS[name])
    results, windows = export_all(model, {"one": presets.resolve("w4a16_sym", group_size=32)}, ("onnx",), tmp_path)
    folder, summary = results["one"]
    theirs = check("genai", "check_genai.py", windows, folder)[str(folder)]
    assert isinstance(theirs, dict), theirs
    ours = summary["perplexity_after"]
    agrees("ONNX Runtime GenAI", "onnx", "w4a16_sym", theirs["perplexity"], ours, SAME, f"tiny {name}", name)


@pytest.mark.parametrize("family", ["smollm2", "gemma"])
def test_a_real_model(family, tmp_path, agrees, request):
    """Its tokenizer gives the tokens of Transformers, those of chats too; the first one of a text (BOS) on request."""
    model = request.getfixturevalue(family)
    results, windows = export_all(model, {"w4a16": presets.resolve("w4a16", group_size=32)}, ("onnx",), tmp_path)
    folder, summary = results["w4a16"]
    theirs = check("genai", "check_genai.py", windows, folder)[str(folder)]
    assert isinstance(theirs, dict), theirs
    name = {"smollm2": "SmolLM2", "gemma": "Gemma 3 270M"}[family]
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    ours = summary["perplexity_after"]
    agrees("ONNX Runtime GenAI", "onnx", "w4a16", theirs["perplexity"], ours, TOLERANCE, name, model_type)
    texts, tokenizer = tmp_path / "texts.json", AutoTokenizer.from_pretrained(folder)
    texts.write_text(json.dumps(TEXTS))
    said = check("genai", "check_genai.py", "--texts", texts, folder)
    assert said["texts"] == [tokenizer(text).input_ids for text in TEXTS]
    by_default = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert said["without_special_tokens"] == by_default, "docs/how-to/onnx.md says what a text needs"
    assert ("chat" in said) == (family == "smollm2")
    if family == "gemma":  # a base model
        return
    chat = [{"role": "user", "content": TEXTS[0]}]
    assert said["chat"] == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert said["chat_tokens"] == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
