"""Behaviour in a job and in ``bitfoundry evaluate``: both models answer, and the report says what got worse."""

import hashlib
import json

import pytest
from transformers import AutoTokenizer

from quantcore.cli import main as cli
from quantcore.cli.flags import parser
from quantcore.cli.from_flags import evaluation_of, request_of, task_of
from quantcore.config.task import EvaluationConfig
from quantcore.engine.pipeline.job import run
from quantcore.errors import ConfigError
from tests.support.jobs import task
from tests.support.models import tiny_model

ASKED = {"num_windows": 3, "seq_len": 64, "num_prompts": 0, "num_answers": 0}
FLAGS = ["--num_eval_data", "3", "--eval_seq_len", "64", "--behaviour", "4", "--behaviour_len", "16"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("chat") / "model", rank=8, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A file with three prompts of two kinds."""
    file = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("Hello!", "How are you?", "Goodbye!")]
    rows[1]["answer"] = 42
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def made(chat_model, tmp_path_factory):
    """A job's result, and its report."""
    folder = tmp_path_factory.mktemp("made") / "out"
    asked = EvaluationConfig(**ASKED, num_behaviour_prompts=4, behaviour_len=16)
    job = task(chat_model, folder, "int8_weight_only").model_copy(update={"evaluation": asked})
    return folder, run(job, lambda event: None)


def test_a_job_reports_the_behaviour_of_its_result(made):
    folder, report = made
    assert report.behaviour.num_prompts == 4 and report.behaviour.max_tokens == 16
    assert not report.behaviour.lost_ends and not report.behaviour.num_rendered_otherwise
    written = json.loads((folder / "report.json").read_text())
    assert written["behaviour"] == report.behaviour.to_dict()
    assert written["evaluation"]["num_behaviour_prompts"] == 4
    assert "<h2>Behaviour</h2>" in (folder / "report.html").read_text()
    assert "In its own answers: " in (folder / "README.md").read_text()


def test_a_result_is_compared_as_its_job_did(made, chat_model, capsys):
    folder, report = made
    assert cli.main(["evaluate", str(folder), "--against", str(chat_model), *FLAGS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["behaviour"] == json.loads(json.dumps(report.behaviour.to_dict()))


def test_own_prompts_are_asked_instead_of_the_packaged_ones(made, chat_model, prompts, tmp_path, capsys):
    """Beside the original, and by its reference; the hash of the file is in both reports."""
    out, digest = str(made[0]), hashlib.sha256(prompts.read_bytes()).hexdigest()
    command = ["evaluate", out, "--against", str(chat_model), *FLAGS, "--prompts", str(prompts), "--json"]
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["behaviour"]["num_prompts"], found["behaviour"]["prompts_sha256"]) == (3, digest)
    assert (found["answers"]["num_windows"], found["answers"]["prompts_sha256"]) == (3, digest)
    assert [each["kind"] for each in found["answers"]["by_kind"]] == ["chat", "maths"]
    file = tmp_path / "reference.safetensors"
    assert cli.main(["reference", str(chat_model), "-o", str(file), *FLAGS[:4], "--prompts", str(prompts)]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", out, "--reference", str(file), "--json"]) == 0
    by_file = json.loads(capsys.readouterr().out)
    assert by_file["answers"]["prompts_sha256"] == digest == by_file["reference"]["answers"]["prompts_sha256"]
    assert by_file["answers"]["divergence"]["top1_agreement"] == found["answers"]["divergence"]["top1_agreement"]


def test_a_model_that_cannot_be_asked_refuses_own_prompts(prompts, tmp_path, capsys):
    plain = tiny_model(tmp_path / "plain")
    assert cli.main(["reference", str(plain), "-o", str(tmp_path / "a"), *FLAGS[:4], "--prompts", str(prompts)]) == 1
    assert "no_answers" in capsys.readouterr().err and not (tmp_path / "a").exists()


def test_wrong_prompts_are_told_before_a_model_is_read(chat_model, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text('{"prompt": "Hello"}')
    for command in (["evaluate", str(chat_model), "--against", str(chat_model)], ["quantize", str(chat_model), "fp8"]):
        more = ["-o", str(tmp_path / "out")] if command[0] == "quantize" else []
        assert cli.main([*command, *more, "--prompts", str(tmp_path / "own.jsonl")]) == 1
        assert "there is no field 'prompt'" in " ".join(capsys.readouterr().err.split())


def test_without_the_flag_nobody_answers(made, chat_model, capsys, monkeypatch):
    monkeypatch.setattr("quantcore.engine.commands.evaluate.compare_behaviour", None)
    assert cli.main(["evaluate", str(made[0]), "--against", str(chat_model), *FLAGS[:4], "--json"]) == 0
    assert "behaviour" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["evaluate", "out", "--behaviour"], "--behaviour needs the original itself"),
        (["evaluate", "--behaviour", "out", "--against", "x"], "a model comes before this flag"),
        (["evaluate", "out", "--prompts", "own.jsonl"], "--prompts needs an original, which answers them"),
        (["evaluate", "out", "--reference", "a", "--prompts", "own.jsonl"], "--reference brings its own prompts"),
        (["reference", "out", "-o", "new.safetensors", "--behaviour", "3"], "a reference holds no behaviour"),
    ],
)
def test_flags_that_do_not_fit_are_named(command, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(command)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"file2file": True}, {"evaluation": {"num_windows": 0}}])
def test_what_measures_nothing_refuses_behaviour(changes, chat_model, tmp_path):
    job = task(chat_model, tmp_path / "out", "int8_weight_only").model_dump(mode="json", exclude={"config"})
    job["config"] = task(chat_model, tmp_path / "out", "int8_weight_only").config
    evaluation = changes.get("evaluation", {}) | {"num_behaviour_prompts": 2}
    with pytest.raises(ConfigError) as caught:
        type(task(chat_model, tmp_path / "out")).model_validate(job | changes | {"evaluation": evaluation})
    assert caught.value.field == "/evaluation/num_behaviour_prompts"


def test_what_cannot_ask_own_prompts_refuses_them(prompts, tmp_path):
    flags = parser()
    words = ["model", "fp8", "-o", str(tmp_path / "out"), "--prompts", str(prompts)]
    with pytest.raises(ConfigError, match="--skip_evaluation turns all measurements off"):
        task_of(flags.parse_args([*words, "--skip_evaluation"]))
    with pytest.raises(ConfigError, match="stays on this machine"):
        request_of(flags.parse_args(words), flags.given(words))
    with pytest.raises(ConfigError, match="38 packaged prompts; more come from a file"):
        evaluation_of(flags.parse_args(["model", "--behaviour", "39"]))
    assert evaluation_of(flags.parse_args([*words, "--behaviour", "39"])).num_behaviour_prompts == 39
