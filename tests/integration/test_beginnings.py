"""Windows begin as the tokenizer begins a text. The judge is Transformers: its tokenizer, and its logits."""

import json
import math
from array import array
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantcore.config.task import EvaluationConfig
from quantcore.config.texts import CalibrationConfig
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.evaluation.samples import find_prompts
from quantcore.engine.evaluation.text import document_tokenizer, of_stream, of_windows, read_text
from quantcore.engine.pipeline.job import read_windows, run
from quantcore.engine.runtime.matmul import matmul_precision
from quantcore.errors import ProofError
from tests.support.jobs import CPU, task, token_windows_of_jobs
from tests.support.models import tiny_model, tiny_tokenizer

BEGIN = "<s>"
TEXT = "Of words there are many, and of numbers more; a model is to guess which is next. Why? " * 20
TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = tiny_tokenizer(BEGIN)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def bos():
    return tiny_tokenizer(BEGIN).bos_token_id


def test_every_window_of_a_job_begins_as_a_text_does(model, tmp_path):
    windows = read_windows(task(model, tmp_path / "out"))
    for ids_NT in (windows.calibration_NT, windows.held_out_NT):
        assert set(ids_NT[:, 0].tolist()) == {bos()} and ids_NT.shape[1] == 64
        assert bos() not in ids_NT[:, 1:]


def test_the_perplexity_is_that_of_transformers_with_its_own_first_token(model, text_file):
    evaluation = EvaluationConfig(num_windows=3, seq_len=64, source=str(text_file), num_prompts=0)
    found = evaluate(str(model), None, evaluation, lambda event: None).quality
    tokenizer = tiny_tokenizer(BEGIN)
    assert tokenizer(TEXT)["input_ids"][0] == bos()
    stream = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    whole, losses = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), []
    for start in range(0, 3 * 63, 63):
        window = torch.tensor([[bos(), *stream[start : start + 63]]])
        with torch.no_grad(), matmul_precision(CPU):
            log_p = whole(window).logits[0].double().log_softmax(-1)
        losses += [-log_p[place - 1, window[0, place]].item() for place in range(1, 64)]  # of the text alone
    assert found.num_tokens == len(losses) == 3 * 63
    assert found.after.token_perplexity.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_every_token_of_a_stream_is_scored_once_behind_the_first_one():
    tokenizer = tiny_tokenizer(BEGIN)
    ids = [*range(10, 210)]
    text = of_stream(array("q", ids), tokenizer, 64, 24, (bos(),))
    assert set(text.ids_NT[:, 0].tolist()) == {bos()}
    assert text.ids_NT[:, 1:][text.scored_NP].tolist() == ids
    assert text.ids_NT[-1, 1:].tolist() == ids[-63:]


def test_a_chat_whose_template_writes_the_first_token_does_not_get_two(model, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(2000)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    calibration = CalibrationConfig(source=str(file), column="messages", num_samples=4, seq_len=32)
    windows = read_windows(task(model, tmp_path / "out").model_copy(update={"calibration": calibration}))
    evaluation = EvaluationConfig(num_windows=20, seq_len=32, source=str(file), column="messages")
    for ids_NT in (windows.calibration_NT, windows.held_out_NT, read_text(evaluation, model).ids_NT):
        assert set(ids_NT[:, 0].tolist()) == {bos()} and bos() not in ids_NT[:, 1]


def test_prompts_begin_as_a_text_does(model):
    tokenizer = tiny_tokenizer(BEGIN)
    text = of_windows(torch.tensor([[bos(), *range(10, 73)]]), tokenizer)
    asked, continued = (find_prompts(tokenizer, {}, text, num, None)[-1] for num in (8, 9))
    assert asked.ids[0] == bos() and bos() not in asked.ids[1:]  # the template's own
    assert continued.ids[:2] == [bos(), 10] and BEGIN not in continued.text


@pytest.mark.parametrize("part", ["quantcore.engine.pipeline.job", "quantcore.engine.evaluation.text"])
def test_a_missing_first_token_is_caught_in_the_job(
    model, text_file, tmp_path, proof_in_this_process, monkeypatch, part
):
    """The mutant: calibration, or an evaluation's own text, without what begins a text."""
    made = document_tokenizer
    monkeypatch.setattr(f"{part}.document_tokenizer", lambda *arguments: replace(made(*arguments), begin=()))
    job = task(model, tmp_path / "out", "w4a16", ("compressed_tensors",))
    evaluation = EvaluationConfig(num_windows=2, seq_len=64, source=str(text_file), num_prompts=0)
    with pytest.raises(ProofError) as caught:
        run(job.model_copy(update={"evaluation": evaluation}), lambda event: None)
    assert caught.value.code == "proof_windows_begin_otherwise"


def test_tokenizers_that_begin_nothing_have_the_windows_that_they_had(tmp_path):
    windows = read_windows(task(tiny_model(tmp_path / "model"), tmp_path / "out"))
    assert torch.equal(windows.calibration_NT, token_windows_of_jobs().calibration_NT)
    assert torch.equal(windows.held_out_NT, token_windows_of_jobs().held_out_NT)
