"""The small job of the self-test."""

import os

import pytest
import torch
from transformers import AutoTokenizer

from quantcore.engine.evaluation.baseline_cache import VARIABLE
from quantcore.engine.runtime.devices import DEVICE
from quantcore.engine.selftest import trial_job
from quantcore.importing.model import read_model


def test_the_model_needs_no_network(tmp_path):
    trial_job.write_model(tmp_path / "one")
    headers = read_model(tmp_path / "one").headers
    assert headers.main_dtype == "BF16" and headers.config["num_hidden_layers"] == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    ids = tokenizer("Größe")["input_ids"]
    assert len(ids) == len("Größe".encode()) and tokenizer.decode(ids) == "Größe"
    assert tokenizer.eos_token_id == 256
    torch.manual_seed(1)
    trial_job.write_model(tmp_path / "two")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two, "every machine quantizes the same model"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_job_and_its_proof_are_told_their_device(device, monkeypatch):
    def run(task, emit):
        seen.update(os.environ)
        raise RuntimeError("seen")

    seen = {}
    monkeypatch.setattr(trial_job, "run", run)
    monkeypatch.setenv(VARIABLE, "before")
    with pytest.raises(RuntimeError, match="seen"):
        trial_job.quantized(torch.device(device))
    assert seen[VARIABLE] == "" and seen.get(DEVICE) == (None if device == "cpu" else device)
    assert os.environ[VARIABLE] == "before" and DEVICE not in os.environ


@pytest.mark.slow
def test_the_job_is_proven_and_gives_its_codes():
    found = trial_job.quantized(torch.device("cpu"))
    assert found.codes.numel() > 100_000 and found.codes.unique().numel() == 16
    assert len(found.numbers) == 14 and (found.numbers > 0).all() and (found.numbers < 0.1).all()
