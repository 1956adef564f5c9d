"""Perplexities and divergence of a job are those of Transformers, computed whole and in another way."""

import math
from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantcore.config.task import EvaluationConfig
from quantcore.engine.evaluation.text import of_stream, read_text
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.matmul import matmul_precision
from tests.support.jobs import CPU, task
from tests.support.models import tiny_model, tiny_tokenizer
from tests.support.proofs import proving_here

LENGTH, STRIDE = 64, 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", rank=8)


def whole_logits(folder, windows_NT):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad(), matmul_precision(CPU):
        return torch.stack([model(window[None]).logits[0] for window in windows_NT]).double()


@pytest.fixture(scope="module")
def measured(model_dir, tmp_path_factory):
    """(report, the windows, logits of the original and of the dequantized result, float64)."""
    folder = tmp_path_factory.mktemp("out")
    text = folder / "text.txt"
    text.write_text("Of words there are many, and of numbers more; a model is to guess which is next. Why? " * 9)
    evaluation = EvaluationConfig(num_windows=5, seq_len=LENGTH, stride=STRIDE, source=str(text))
    job = task(model_dir, folder / "out", "w4a16", ("quark", "fake_quantized"))
    with proving_here():
        report = run(job.model_copy(update={"evaluation": evaluation}), lambda event: None).to_dict()
    windows = read_text(evaluation, model_dir)
    logits = [whole_logits(path, windows.ids_NT) for path in (model_dir, folder / "out" / "fake_quantized")]
    return report, windows, text.read_text(), *logits


def test_every_token_is_scored_once_in_as_much_context_as_there_is():
    ids = torch.arange(200)
    text = of_stream(array("q", range(200)), tiny_tokenizer(), 64, 24)
    scored = text.ids_NT[:, 1:][text.scored_NP]
    assert torch.equal(scored, ids[1:])
    assert torch.equal(text.ids_NT[-1], ids[-64:]) and text.ids_NT[:-1, 0].tolist() == [0, 24, 48, 72, 96, 120]
    assert text.first_N.tolist() == [1, 40, 40, 40, 40, 40, 48]


def test_perplexities_are_those_of_transformers(measured):
    report, windows, _, before, after = measured
    ids = read_all(windows)
    words = len(tiny_tokenizer().decode(ids[1:], skip_special_tokens=True).split())
    num_bytes = len(tiny_tokenizer().decode(ids[1:], skip_special_tokens=True).encode())
    for name, logits in (("before", before), ("after", after)):
        total = sum(losses_of(logits, windows))
        found = report["quality"][name]
        assert found["token_perplexity"]["value"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-5)
        assert found["word_perplexity"]["value"] == pytest.approx(math.exp(total / words), rel=1e-4)
        assert found["byte_perplexity"]["value"] == pytest.approx(math.exp(total / num_bytes), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(total / num_bytes / math.log(2), rel=1e-5)
    assert report["quality"]["num_tokens"] == len(ids) - 1


def test_divergence_is_that_of_transformers(measured):
    report, windows, _, before, after = measured
    found, rows = report["quality"]["divergence"], []
    for number, first in enumerate(windows.first_N.tolist()):
        for place in range(first - 1, LENGTH - 1):  # what stands here predicts the next token
            p, q = before[number, place].softmax(0), after[number, place].softmax(0)
            agrees = bool(before[number, place].argmax() == after[number, place].argmax())
            rows.append((float((p * (p / q).log()).sum()), agrees))
    kl = sorted(row[0] for row in rows)
    assert found["kl_mean"]["value"] == pytest.approx(sum(kl) / len(kl), rel=1e-3) and sum(kl) > 0.5
    assert found["kl_p99"] == pytest.approx(kl[math.ceil(0.99 * len(kl)) - 1], rel=1e-3)
    assert found["top1_agreement"]["value"] == pytest.approx(sum(row[1] for row in rows) / len(rows))
    lost, power = after - before, before
    lost, power = (one - one.mean(-1, keepdim=True) for one in (lost, power))
    scored = windows.scored_NP
    ratio = lost[:, :-1][scored].norm() / power[:, :-1][scored].norm()
    assert found["logit_error"] == pytest.approx(ratio.item(), rel=1e-4)


def test_errors_are_those_of_a_jackknife(measured):
    """Leaving out one window after the other says how far the mean moves (Tukey)."""
    report, windows, _, before, after = measured
    losses = [torch.tensor(losses_of(logits, windows, by_window=True)) for logits in (before, after)]
    counts = windows.scored_NP.sum(1)
    for found, sums in (
        (report["quality"]["before"]["token_perplexity"], losses[0]),
        (report["quality"]["ratio"], losses[1] - losses[0]),
    ):
        means = (sums.sum() - sums) / (counts.sum() - counts)
        n = len(means)
        jackknife = math.sqrt((n - 1) / n * (means - means.mean()).square().sum())
        assert found["stderr"] / found["value"] == pytest.approx(jackknife, rel=0.35)


def read_all(windows):
    pieces = [ids[int(first) :] for ids, first in zip(windows.ids_NT, windows.first_N, strict=True)]
    return [int(windows.ids_NT[0, 0]), *torch.cat(pieces).tolist()]


def losses_of(logits, windows, by_window=False):
    found = []
    for ids, first, of_window in zip(windows.ids_NT, windows.first_N.tolist(), logits, strict=True):
        probabilities = of_window.softmax(-1)
        found.append([-math.log(probabilities[place - 1, ids[place]]) for place in range(first, LENGTH)])
    return [sum(one) for one in found] if by_window else [loss for one in found for loss in one]
