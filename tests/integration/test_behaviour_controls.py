"""Positive controls on a real chat model: broken results are caught, and a good one is not blamed."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from bitfoundry.local import demo_model
from quantcore.data.prompts import ChatPrompt, PromptSet
from quantcore.engine.evaluation.baseline_cache import VARIABLE, BaselineCache
from quantcore.engine.evaluation.behaviour import compare_behaviour
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.importing.model import read_model

pytestmark = pytest.mark.slow
QUESTIONS = (
    "What is the capital of France?", "What is the capital of Japan?", "What colour is the sky on a clear day?",
    "How many days does a week have?", "What is the opposite of hot?", "Which animal says meow?",
    "What is 2 plus 3?", "Who wrote Romeo and Juliet?", "What is the largest planet of the solar system?",
    "Say hello to my friend Anna.", "What do bees make?", "Which month comes after May?",
    "What is the capital of Italy?", "What is the capital of Germany?", "Who painted the Mona Lisa?",
    "In which year did the Second World War end?",
)  # fmt: skip
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The model and the cache of its answers. It ends its answers to most of QUESTIONS within NEW_TOKENS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("originals")))
        yield demo_model.prepare(print)


@pytest.fixture
def result(original, tmp_path):
    """A copy of the original, of which a test breaks something."""
    return shutil.copytree(original, tmp_path / "result")


def behaviour(original, result):
    asked = PromptSet(tuple(ChatPrompt("chat", [{"role": "user", "content": text}]) for text in QUESTIONS))
    models = [open_model(read_model(folder)) for folder in (original, result)]
    pair = ModelPair(*models, BaselineCache("SmolLM2"))
    return compare_behaviour((original, result), {}, asked, NEW_TOKENS, pair, lambda event: None)


def rounded(folder, bits, group_size):
    """Round the weights of all blocks to ``bits`` bits, plainly, in symmetric groups."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, weight_OI in tensors.items():
        if ".layers." in name and weight_OI.ndim == 2:
            groups = weight_OI.float().reshape(-1, group_size)
            scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
            codes = (groups / scale - 0.5).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
            tensors[name] = (codes * scale).reshape(weight_OI.shape).to(weight_OI.dtype)
    save_file(tensors, path, {"format": "pt"})


def test_2_bits_are_caught(original, result):
    rounded(result, 2, 64)
    found = behaviour(original, result)
    assert any("do not end" in finding for finding in found.findings), found.faults
    assert not found.lost_ends and not found.num_rendered_otherwise


def test_8_bits_pass(original, result):
    rounded(result, 8, 64)
    assert behaviour(original, result).findings == ()


def test_a_stop_token_missing_in_generation_config_is_caught(original, result):
    path = result / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 0}))
    found = behaviour(original, result)
    assert found.findings[0] == "<|im_end|> no longer ends an answer"
    assert "100% of the answers do not end" in found.findings[1]


def test_a_lost_token_that_ends_a_turn_is_caught(original, result):
    """The tokenizer no longer knows <|im_end|> as one token, so that prompts have its letters instead."""
    tokenizer = json.loads((result / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != "<|im_end|>"]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["<|gone|>"] = vocabulary.pop("<|im_end|>")
    (result / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = (result / "tokenizer_config.json").read_text()
    (result / "tokenizer_config.json").write_text(config.replace("<|im_end|>", "<|endoftext|>"))
    found = behaviour(original, result)
    assert found.num_rendered_otherwise == len(QUESTIONS)
    assert found.findings[0] == "<|im_end|> no longer ends an answer"


def test_another_template_is_caught(original, result):
    template = result / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>assistant", "<|im_start|>bot"))
    found = behaviour(original, result)
    assert found.num_rendered_otherwise == len(QUESTIONS) and "chat template" in found.findings[0]
