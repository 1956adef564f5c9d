"""Own answers: scored as a plain loop would, whatever their lengths; what could not be asked is listed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantcore.config.job_spec import MAX_ANSWERS
from quantcore.data.builtin_text import read_kind, read_prompts
from quantcore.data.prompts import ChatPrompt, packaged_prompts, read_prompt_set
from quantcore.engine.evaluation.baseline_cache import VARIABLE, BaselineCache
from quantcore.engine.evaluation.generation import Prompt
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.evaluation.own_answers import (
    ANSWER_LEN,
    Question,
    answers_of,
    compare_own_answers,
    find_questions,
    score_answers,
)
from quantcore.events import silence
from quantcore.importing.model import read_model
from tests.support.models import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
END = 0


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ModelPair]:
    """A folder with a chat model, and the pair of it and another one."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "originals"))
    original = chat_model(tmp_path / "original", 0)
    models = [open_model(read_model(folder)) for folder in (original, chat_model(tmp_path / "other", 1))]
    return original, ModelPair(*models, BaselineCache("original"))


def chat_model(folder: Path, seed: int) -> Path:
    tiny_model(folder, seed=seed, dtype=torch.float32, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_scores_are_those_of_a_plain_loop(pair: tuple[Path, ModelPair]) -> None:
    folder, models = pair
    asked = [("chat", [5, 6, 7], [8, 9, END]), ("chat", list(range(20, 60)), [4]), ("code", [11], [12] * 30)]
    questions = [Question(ChatPrompt(kind, []), Prompt(ids, "")) for kind, ids, _ in asked]
    answers = answers_of(questions, [answer for *_, answer in asked], [END], {}, AutoTokenizer.from_pretrained(folder))
    found = score_answers(answers, models, silence)
    loaded = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, folder.with_name("other"))]
    divergences, agreements = [], []
    for _, ids, answer in asked:
        with torch.inference_mode():
            before, after = (
                functional.log_softmax(model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1], -1)
                for model in loaded
            )
        divergences.append((before.exp() * (before - after)).sum(-1))
        agreements.append((before.argmax(-1) == after.argmax(-1)).double())
    assert found.num_tokens == 34 and found.num_windows == 3 and found.num_ended == 1
    assert found.divergence.kl_mean.value == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-5)
    assert found.divergence.top1_agreement.value == pytest.approx(torch.cat(agreements).mean().item())
    by_kind = {each.kind: each for each in found.by_kind}
    assert [by_kind[kind].num_answers for kind in ("chat", "code")] == [2, 1]
    assert by_kind["code"].kl_mean.value == pytest.approx(divergences[2].mean().item(), rel=1e-5)
    assert [(each.first, each.num_tokens) for each in found.by_position] == [(1, 20), (17, 14)]


def test_answers_are_made_once_and_cached(pair: tuple[Path, ModelPair], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, models = pair
    first = compare_own_answers(folder, {}, read_prompt_set(None, 5), models, silence)
    assert first is not None and first.num_windows == 5 and first.seq_len <= ANSWER_LEN
    monkeypatch.setattr("quantcore.engine.evaluation.own_answers.continue_prompts", None)
    assert compare_own_answers(folder, {}, read_prompt_set(None, 5), models, silence) == first


def test_a_model_beside_itself_is_the_same(pair: tuple[Path, ModelPair]) -> None:
    folder, models = pair
    twice = ModelPair(models.original, open_model(read_model(folder)), models.baselines)
    same = compare_own_answers(folder, {}, read_prompt_set(None, 3), twice, silence)
    assert same is not None
    assert (same.divergence.kl_mean.value, same.divergence.top1_agreement.value, same.ratio.value) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("template", "num", "left_out"),
    [
        (TEMPLATE, MAX_ANSWERS, {}),
        (TEMPLATE.replace("tools", "TOOLS"), MAX_ANSWERS - 4, {"tools": "never reads tools"}),
        (NO_SYSTEM + TEMPLATE, MAX_ANSWERS - 1, {"turns": "no system role"}),
        (None, 0, {}),
    ],
)
def test_what_a_template_does_not_take_is_listed(template: str | None, num: int, left_out: dict[str, str]) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    questions, reasons = find_questions(tokenizer, {}, packaged_prompts(MAX_ANSWERS), None)
    assert len(questions) == num and reasons.keys() == left_out.keys()
    assert all(part in reasons[kind] for kind, part in left_out.items()), reasons


def test_what_is_too_long_for_the_model_is_listed() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    every, _ = find_questions(tokenizer, {}, packaged_prompts(MAX_ANSWERS), None)
    longest = sorted(len(question.prompt.ids) for question in every)[-3] + ANSWER_LEN
    asked, reasons = find_questions(tokenizer, {}, packaged_prompts(MAX_ANSWERS), longest)
    assert len(asked) == MAX_ANSWERS - 2 and all("too long for the model" in reason for reason in reasons.values())


def test_no_prompt_is_in_the_calibration_text() -> None:
    rows = read_prompts()
    assert len(rows) == MAX_ANSWERS
    dialogues = "\n".join(read_kind("dialogue"))
    for row in rows:
        assert all(message["content"] not in dialogues for message in row["messages"])
