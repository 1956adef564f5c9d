"""Samples: chat models are asked questions, other models continue texts, and a batch changes no answer."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from quantcore.engine.evaluation.generation import BATCH, Prompt, continue_prompts, end_tokens, without_end
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.samples import NEW_TOKENS, PROMPT_LEN, QUESTIONS, find_prompts, is_degenerate
from quantcore.engine.evaluation.text import of_windows
from quantcore.importing.model import read_model
from tests.support.models import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def text():
    return of_windows(torch.arange(3 * 40).reshape(3, 40) % 90 + 5, tiny_tokenizer())


def tokenizer_for(template=None):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def test_a_chat_model_is_asked_questions_and_then_continues_texts(text):
    tokenizer = tokenizer_for(TEMPLATE)
    prompts = find_prompts(tokenizer, {}, text, 10, None)
    assert [prompt.text for prompt in prompts[:8]] == list(QUESTIONS) and len(prompts) == 10
    rendered = f"<user>{QUESTIONS[0]}<a>"
    assert prompts[0].ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert [prompt.ids for prompt in prompts[8:]] == text.ids_NT[:2, :PROMPT_LEN].tolist()
    assert [prompt.text for prompt in find_prompts(tokenizer, {}, text, 2, None)] == list(QUESTIONS[:2])


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"])
def test_without_a_template_that_works_texts_are_continued(text, template):
    prompts = find_prompts(tokenizer_for(template), {}, text, 4, None)
    assert [prompt.ids for prompt in prompts] == text.ids_NT[:, :PROMPT_LEN].tolist()


def test_a_question_that_is_too_long_for_the_model_is_left_out(text):
    tokenizer = tokenizer_for(TEMPLATE)
    lengths = [len(prompt.ids) for prompt in find_prompts(tokenizer, {}, text, 8, None)]
    longest = sorted(lengths)[3] + NEW_TOKENS
    asked = find_prompts(tokenizer, {}, text, 8, longest)[:-3]
    assert [prompt.text for prompt in asked] == [
        question for question, length in zip(QUESTIONS, lengths, strict=True) if length + NEW_TOKENS <= longest
    ]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mamba"])
def test_prompts_of_several_lengths_are_continued_as_each_alone(tmp_path, model_type):
    model = open_model(read_model(tiny_model(tmp_path, model_type=model_type, dtype=torch.float32)))
    prompts = [Prompt(list(range(5, 5 + length)), "") for length in (3, 9, 6, *range(10, 10 + BATCH))]
    together = continue_prompts(model, prompts, [1], 8)
    assert together == [answer for prompt in prompts for answer in continue_prompts(model, [prompt], [1], 8)]
    [ended] = continue_prompts(model, prompts[:1], [together[0][2]], 8)
    assert ended == together[0][: together[0].index(together[0][2]) + 1], "with the token that ends it"
    assert without_end(ended, [ended[-1]]) == ended[:-1] and without_end(ended, []) == ended


def test_an_answer_ends_with_any_of_the_models_end_tokens(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    headers = SimpleNamespace(config={"eos_token_id": 5, "text_config": {"eos_token_id": 6}})
    assert end_tokens(SimpleNamespace(headers=headers, folder=tmp_path), SimpleNamespace(eos_token_id=9)) == {
        5,
        6,
        7,
        8,
        9,
    }


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([], True), ([4], False), ([4, 4], False), ([1, 2, 3, 4, 4, 4, 4, 4], True), ([1, 2, 3, 4, 4, 4, 4, 5], False)],
)
def test_degenerate_answers(ids, expected):
    assert is_degenerate(ids) is expected
