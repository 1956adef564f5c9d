"""Each model answers in its own template, up to its own stop tokens; what differs there is found without any chance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from quantcore.data.prompts import read_prompt_set
from quantcore.engine.evaluation.baseline_cache import VARIABLE, BaselineCache
from quantcore.engine.evaluation.behaviour import SEEDS, compare_behaviour, served
from quantcore.engine.evaluation.generation import Prompt, continue_prompts
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.errors import ConfigError
from quantcore.events import silence
from quantcore.importing.model import read_model
from quantcore.report.behaviour import Behaviour
from tests.support.models import tiny_model

TEMPLATE = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LEN = 16
PROMPTS = read_prompt_set(None, 5)


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chat model that ends its first answer: its sixth token is a stop token."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "originals"))
    folder = tiny_model(tmp_path / "original", dtype=torch.float32, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    text = tokenizer.apply_chat_template(PROMPTS.prompts[0].messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    [answer] = continue_prompts(open_model(read_model(folder)), [Prompt(ids, "")], [], LEN)
    generates(folder, eos_token_id=[0, answer[5]])
    return folder


def generates(folder: Path, **settings: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))


def behaviour(original: Path, result: Path) -> Behaviour:
    models = [open_model(read_model(folder)) for folder in (original, result)]
    pair = ModelPair(models[0], models[1], BaselineCache("original"))
    return compare_behaviour((original, result), {}, PROMPTS, LEN, pair, silence)


def copied(original: Path) -> Path:
    return Path(shutil.copytree(original, original.with_name("result")))


def test_a_model_beside_itself_behaves_the_same(original: Path) -> None:
    found = behaviour(original, copied(original))
    assert found.findings == () and found.lost_ends == () and found.num_rendered_otherwise == 0
    assert found.num_prompts == 5 and found.num_answers == (1, 1)
    assert found.length is not None and found.length.ratio.value == 1
    assert all(each.outcome == "no difference" for each in found.faults)
    endless = next(each for each in found.faults if each.fault == "endless")
    assert 0 < endless.original < 1


def test_a_stop_token_that_is_missing_is_found(original: Path) -> None:
    result = copied(original)
    generates(result, eos_token_id=0)
    found = behaviour(original, result)
    assert len(found.lost_ends) == 1 and "no longer ends an answer" in found.findings[0]
    endless = next(each for each in found.faults if each.fault == "endless")
    assert endless.num_worse >= 1 and endless.num_better == 0


@pytest.mark.parametrize(("template", "num"), [(TEMPLATE + "<assistant>", 5), (None, 5), (TEMPLATE + " ", 5)])
def test_another_template_is_found(template: str | None, num: int, original: Path) -> None:
    result = copied(original)
    tokenizer = AutoTokenizer.from_pretrained(result)
    tokenizer.chat_template = template
    for path in result.glob("chat_template*"):
        path.unlink()
    tokenizer.save_pretrained(result)
    found = behaviour(original, result)
    assert found.num_rendered_otherwise == num and "chat template" in found.findings[0]
    assert (found.length is None) is (template is None), "a model without a template cannot be asked"


def test_answers_are_also_sampled_as_each_model_says(original: Path) -> None:
    generation = json.loads((original / "generation_config.json").read_text())
    result = copied(original)
    generates(original, **generation, do_sample=True, temperature=0.9, top_k=20, repetition_penalty=1.1)
    found = behaviour(original, result)
    assert found.num_answers == (1 + len(SEEDS), 1)


def test_samples_are_drawn_by_the_seed(original: Path) -> None:
    model, prompts = open_model(read_model(original)), [Prompt([5, 6, 7], ""), Prompt([8], "")]
    drawn = [continue_prompts(model, prompts, [], LEN, {"temperature": 1.5}, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert continue_prompts(model, prompts, [], LEN, {"temperature": 1.5, "top_k": 1}) == continue_prompts(
        model, prompts, [], LEN
    )


def test_what_fills_up_a_prompt_is_not_penalized_as_repeated(original: Path) -> None:
    """Transformers leaves it out. Otherwise a stop token that fills shorter prompts would come less often for them."""
    model, prompts = open_model(read_model(original)), [Prompt([5, 6, 7], ""), Prompt([8] * 12, "")]
    penalty = {"top_k": 1, "repetition_penalty": 100.0}
    [[end]] = continue_prompts(model, prompts[:1], [], 1)
    together = continue_prompts(model, prompts, [end], LEN, penalty)
    assert together == [continue_prompts(model, [prompt], [end], LEN, penalty)[0] for prompt in prompts]
    assert together[0] == [end]


def test_the_original_answers_once(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = copied(original), []

    def watched(model: object, *arguments: object) -> list[list[int]]:
        asked.append(model)
        return continue_prompts(model, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("quantcore.engine.evaluation.behaviour.continue_prompts", watched)
    first, second = behaviour(original, result), behaviour(original, result)
    assert first == second and len(asked) == 3


def test_a_model_that_cannot_chat_has_no_behaviour(original: Path) -> None:
    plain = tiny_model(original.with_name("plain"), dtype=torch.float32)
    with pytest.raises(ConfigError) as caught:
        behaviour(plain, plain)
    assert caught.value.code == "no_behaviour" and "no chat template" in caught.value.message


def test_stop_tokens_are_those_that_transformers_takes(original: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(original)
    (original / "generation_config.json").unlink()
    config = json.loads((original / "config.json").read_text())
    for settings, ends in (
        ({"eos_token_id": 3}, {3}),
        ({"text_config": {"eos_token_id": [4, 5]}}, {4, 5}),
        ({}, set()),
    ):
        kept = {name: value for name, value in config.items() if name != "eos_token_id"}
        (original / "config.json").write_text(json.dumps(kept | settings))
        assert served(original, tokenizer) == (ends, None)
    generates(original, do_sample=True, temperature=0.6, top_p="high", pad_token_id=1)
    assert served(original, tokenizer) == (set(), {"temperature": 0.6})
    generates(original, do_sample=True, temperature=2, top_k=20.0, repetition_penalty=2)
    _, sampling = served(original, tokenizer)
    assert sampling == {"temperature": 2, "top_k": 20, "repetition_penalty": 2}
    assert {name: type(value) for name, value in sampling.items()} == dict.fromkeys(sampling, float) | {"top_k": int}
    for greedy in ({"do_sample": True, "temperature": 0}, {"do_sample": False, "temperature": 1}):
        generates(original, **greedy)
        assert served(original, tokenizer)[1] is None
