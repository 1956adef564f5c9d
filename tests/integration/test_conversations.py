"""Conversations that a chat model writes: where its template puts a question, what is dropped, and a real model."""

import copy
import json

import pytest
from transformers import AutoTokenizer

from bitfoundry.local import demo_model
from quantcore.cli.main import main
from quantcore.engine.commands.conversations import MARK, _fault, find_turn
from quantcore.engine.data.chat_template import chat_renderer
from tests.support.models import tiny_model, tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LONG = "This is the first answer, which says a good deal about the thing that was asked. " * 8


def tokenizer_of(template, special):
    tokenizer = copy.deepcopy(tiny_tokenizer())  # all tests share one
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "special", "before", "end"),
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_start|>user\n", "<|im_end|>"),
        (MISTRAL, ["[INST]", "[/INST]"], "[INST] ", "[/INST]"),
        (CHATML, [], "<|im_start|>user\n", None),  # words, not tokens, end a turn: only the model's own end does
    ],
)
def test_a_question_begins_where_the_template_puts_it(template, special, before, end):
    tokenizer = tokenizer_of(template, special)
    turn = find_turn(chat_renderer(tokenizer, {}), tokenizer)
    assert tokenizer.decode(turn.before) == before
    assert turn.end == (None if end is None else tokenizer.convert_tokens_to_ids(end))


def test_a_template_that_does_not_show_the_question_is_refused(tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0].role }}"
    tokenizer.save_pretrained(model)
    assert main(["conversations", str(model), "-o", str(tmp_path / "own.jsonl")]) == 1
    assert "does not write what a user says" in capsys.readouterr().err and not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_model_that_writes_nothing_of_use_is_given_up(tmp_path, capsys, template):
    """One without a template, and one with random weights, whose texts come to no end."""
    model = tiny_model(tmp_path / "model", vocab_size=520)
    tokenizer = tokenizer_of(template, ["<|im_start|>", "<|im_end|>"])
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    assert main(["conversations", str(model), "-o", str(tmp_path / "own.jsonl")]) == 1
    said = capsys.readouterr().err
    assert ("no chat template" if template is None else "can be used") in said
    assert not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize(
    ("question", "answer", "fault"),
    [
        ("What is a prime number?", "A number with two divisors.", None),
        (None, None, "without an end"),
        ("What is a prime number?", None, "without an end"),
        ("What?", "A number.", "empty"),
        ("What is the sum of both?", "", "empty"),
        ("What is the weather like?", "It is fine.", "asked twice"),
        ("What is a prime number?", LONG, "in a loop"),
        ("What is a prime number?", "<think>It is one that", "thinking without an end"),
    ],
)
def test_what_would_teach_nothing_is_dropped(question, answer, fault):
    assert _fault(question, answer, {"What is the weather like?"}) == fault


@pytest.mark.slow
def test_a_real_chat_model_writes_what_it_can_be_calibrated_on(tmp_path):
    model, file = demo_model.prepare(print), tmp_path / "own.jsonl"
    assert main(["conversations", str(model), "-o", str(file), "--num_tokens", "2500"]) == 0
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert all([message["role"] for message in messages] == ["user", "assistant"] for messages in rows)
    questions = [messages[0]["content"] for messages in rows]
    assert len(set(questions)) == len(rows) and not any("<|im_" in text or MARK in text for text in questions)
    flags = ["--dataset", f"{file}:0.5,builtin:0.5", "--num_calib_data", "8", "--seq_len", "256", "--skip_evaluation"]
    assert main(["quantize", str(model), "w4a16", "-o", str(tmp_path / "out"), "--effort", "fast", *flags]) == 0
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [part["source"] for part in told["calibration"]["sources"]] == [str(file), "builtin"]
