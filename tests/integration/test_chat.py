"""A quantized model and its original answer the same prompts, through the command."""

import json
import sys
import threading
from io import StringIO

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bitfoundry.commands.main import run as bitfoundry
from bitfoundry.local import demo_model
from quantcore.cli import chat as command
from quantcore.cli import main as cli
from quantcore.engine.chat.chat import open_chat, open_chat_alone
from quantcore.engine.chat.streaming import stream_tokens
from quantcore.engine.pipeline.job import run
from quantcore.errors import ConfigError
from tests.support.jobs import task
from tests.support.models import SHAPE, tiny_model, tiny_tokenizer
from tests.support.proofs import prove_here
from tests.support.tokenizers import save_byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
NEW = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model in float32: its largest logit does not depend on the order of sums."""
    return tiny_model(tmp_path_factory.mktemp("chat") / "model", dtype=torch.float32)


@pytest.fixture(scope="module")
def out(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", prove_here)
        run(task(model_dir, folder, "w4a16"), lambda event: None)
    return folder


def with_template(tmp_path):
    """The model, for chats."""
    folder = tiny_model(tmp_path / "with-template", dtype=torch.float32)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


def greedy(folder, text, num_new=NEW):
    """The tokens that Transformers generates after a text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")
    end = ids["input_ids"].shape[1]
    return model.generate(**ids, do_sample=False, max_new_tokens=num_new)[0, end:].tolist()


def test_each_prompt_gets_both_answers_as_json(model_dir, out, capsys, monkeypatch):
    flags = ["--max_new_tokens", str(NEW), "--json"]
    assert cli.main(["chat", str(out), "--prompt", "for example", "the object", *flags]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [turn["prompt"] for turn in found] == ["for example", "the object"]
    decode = tiny_tokenizer().decode
    for turn in found:
        expected = greedy(model_dir, turn["prompt"])
        assert turn["original"]["text"] == decode(expected, skip_special_tokens=True).rstrip("\ufffd")
        assert turn["original"]["num_tokens"] == NEW and turn["quantized"]["time_s"] > 0
        same, char = turn["first_difference"], turn["first_different_char"]
        assert 0 <= same < NEW, "4 bits change what a random model says"
        assert turn["quantized"]["text"][:char] == decode(expected[:same]).rstrip("\ufffd")
    monkeypatch.setattr(sys, "stdin", StringIO("the object\n\nfor example\n"))
    assert bitfoundry(["chat", str(out), "--against", str(model_dir), *flags]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answers(turn) for turn in again] == [answers(turn) for turn in reversed(found)]


def answers(turn):
    return turn["original"]["text"], turn["quantized"]["text"], turn["first_difference"]


def test_the_same_model_says_the_same(model_dir, capsys):
    assert cli.main(["chat", str(model_dir), "--against", str(model_dir), "--prompt", "for example"]) == 0
    assert "no difference" in capsys.readouterr().out


def test_a_chat_with_a_person(tmp_path, monkeypatch):
    """Each model sees its own earlier answers until /reset; a prompt that is too long ends only its turn."""
    folder = with_template(tmp_path)
    seen = []
    monkeypatch.setattr("quantcore.engine.chat.chat.stream_tokens", noting(seen))
    typed = StringIO("hello\nagain\n/reset\n\n" + "long " * SHAPE["max_position_embeddings"] + "\nhello\n/exit\n")
    typed.isatty = lambda: True
    screen = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    monkeypatch.setattr(sys, "stdin", typed)
    monkeypatch.setattr(command, "Console", lambda: screen)
    assert cli.main(["chat", str(folder), "--against", str(folder), "--max_new_tokens", "4"]) == 0
    decode = tiny_tokenizer().decode
    prompts = [decode(ids) for ids in seen]
    answer = decode(greedy(folder, "[user]hello[a]", 4), skip_special_tokens=True).rstrip("\ufffd")
    second = f"[user]hello[assistant]{answer}[user]again[a]"
    assert prompts == ["[user]hello[a]"] * 2 + [second] * 2 + ["[user]hello[a]"] * 2
    assert screen.file.getvalue().count("differs") == 0


def noting(seen):
    def watched(model, ids_T, settings):
        seen.append(ids_T)
        return stream_tokens(model, ids_T, settings)

    return watched


def test_one_model_remembers_the_conversation(tmp_path):
    folder = with_template(tmp_path)
    with open_chat_alone(folder, 4) as chat:
        *_, first = chat.say("hello")
        *_, second = chat.say("again")
    said = f"[user]hello[assistant]{first.quantized.text}[user]again[a]"
    expected = tiny_tokenizer().decode(greedy(folder, said, 4), skip_special_tokens=True).rstrip("\ufffd")
    assert (second.original, second.first_difference, second.quantized.text) == (None, None, expected)


def test_a_turn_that_is_left_is_forgotten_and_its_threads_end(tmp_path):
    folder = with_template(tmp_path)
    before = threading.active_count()
    with open_chat(folder, folder, NEW) as chat:
        turns = chat.say("hello")
        first = next(turns)
        assert (first.original.num_tokens, first.quantized.num_tokens) == (1, 1)
        turns.close()
        assert threading.active_count() == before
        *_, whole = chat.say("hello")
        assert whole.original.num_tokens > 1


def test_a_prompt_without_tokens_is_refused(model_dir):
    with open_chat(model_dir, model_dir) as chat, pytest.raises(ConfigError, match="no tokens"):
        next(chat.say(""))


def test_an_error_of_the_model_reaches_the_reader(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.model.embed_tokens.forward = lambda ids: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(stream_tokens(model, [1, 2], GenerationConfig(max_new_tokens=2)))


def test_a_chat_for_a_worker_is_lines_of_json(tmp_path, capsys, monkeypatch):
    """A prompt that cannot be answered ends its turn alone; a model that cannot be loaded ends the chat."""
    folder = with_template(tmp_path)
    task_file = tmp_path / "task.json"
    task_file.write_text(json.dumps({"artifact_dir": str(folder), "model_dir": str(folder), "max_new_tokens": 4}))
    prompts = ["hello", "long " * SHAPE["max_position_embeddings"], "again"]
    asked = "".join(json.dumps({"number": n, "prompt": text}) + "\n" for n, text in enumerate(prompts, 1))
    monkeypatch.setattr(sys, "stdin", StringIO(asked))
    assert cli.main(["converse", str(task_file)]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0] == {"kind": "chat_ready", "has_template": True}
    ends = [event for event in events if event.get("is_whole") or event["kind"] == "chat_turn_failed"]
    assert [event["number"] for event in ends] == [1, 2, 3]
    assert ends[0]["turn"]["prompt"] == "hello" and ends[0]["turn"]["original"]["num_tokens"] == 4
    assert (ends[1]["kind"], ends[1]["code"]) == ("chat_turn_failed", "chat_too_long")
    task_file.write_text(json.dumps({"artifact_dir": "/nowhere", "model_dir": str(folder), "max_new_tokens": 4}))
    assert cli.main(["converse", str(task_file)]) == 1
    assert json.loads(capsys.readouterr().out)["code"] == "model_not_found"


def test_what_cannot_chat_is_said(model_dir, tmp_path, capsys):
    encoder = tiny_model(tmp_path / "other")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    renamed = tiny_model(tmp_path / "renamed")
    (renamed / "tokenizer.json").unlink()
    save_byte_tokenizer(renamed)
    for folder, code in (
        (encoder, "cannot_generate"), (renamed, "other_vocabulary"), (tmp_path / "nothing", "model_not_found"),
        (tmp_path, "no_config"),
    ):  # fmt: skip
        assert cli.main(["chat", str(folder), "--against", str(model_dir), "--prompt", "x"]) == 1
        assert code in capsys.readouterr().err


def test_a_model_without_an_original_answers_alone(model_dir, out, capsys, monkeypatch):
    """Any model chats; a result does so on request, and then its original is not loaded."""
    flags = ["--prompt", "for example", "--max_new_tokens", str(NEW)]
    assert cli.main(["chat", str(model_dir), *flags, "--json"]) == 0
    printed = capsys.readouterr()
    turn = json.loads(printed.out)
    expected = tiny_tokenizer().decode(greedy(model_dir, "for example"), skip_special_tokens=True).rstrip("\ufffd")
    assert turn == {"prompt": "for example", "answer": turn["answer"]} and turn["answer"]["text"] == expected
    assert "It answers alone" in printed.err and "--against ORIGINAL" in printed.err
    assert cli.main(["chat", str(model_dir), *flags]) == 0
    assert f"[answer: {NEW} tokens" in capsys.readouterr().out
    monkeypatch.setattr("quantcore.engine.chat.chat.open_chat", None)
    assert cli.main(["chat", str(out), "--alone", *flags, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["answer"]["num_tokens"] == NEW and "alone" not in printed.err


@pytest.mark.slow
def test_a_real_model_answers_in_its_template(tmp_path, capsys, proof_in_this_process):
    model_dir = demo_model.prepare(print)
    run(task(model_dir, tmp_path / "out", "int8_weight_only"), lambda event: None)
    capsys.readouterr()
    flags = ["--prompt", "What is the capital of France?", "--max_new_tokens", "20", "--json"]
    assert cli.main(["chat", str(tmp_path / "out"), *flags]) == 0
    turn = json.loads(capsys.readouterr().out)
    assert turn["original"]["text"] == "The capital of France is Paris."
    assert "Paris" in turn["quantized"]["text"]
