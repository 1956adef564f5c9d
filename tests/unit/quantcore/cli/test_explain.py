"""An error that nobody expected becomes one that says what was being done; no traceback is shown."""

import errno
import json
from pathlib import Path

import pytest

from quantcore.cli import main as cli
from quantcore.cli.explain import TRACEBACK, explained
from quantcore.engine.pipeline import job as pipeline
from quantcore.errors import ModelError, QuantError
from quantcore.events import PhaseStarted
from tests.support.models import tiny_model

ERRORS = {
    "unexpected_error": (KeyError("states"), "phase 'quantize': KeyError: 'states'", False),
    "unexpected_error ": (PermissionError(errno.EACCES, "Permission denied", "x"), "Permission denied", True),
    "out_of_memory": (MemoryError("no more of it"), "Out of memory in the phase 'quantize': no more of it", True),
    "disk_full": (OSError(errno.ENOSPC, "No space left"), "The disk is full", True),
}


@pytest.mark.parametrize("code", ERRORS)
def test_what_was_being_done_is_said(code):
    error, words, retryable = ERRORS[code]
    events = []
    with pytest.raises(QuantError) as caught, explained(events.append) as emit:
        emit(PhaseStarted("quantize"))
        raise error
    assert (caught.value.code, caught.value.retryable) == (code.strip(), retryable)
    assert words in caught.value.message and caught.value.hint
    assert events == [PhaseStarted("quantize")]


def test_known_errors_stay_as_they_are():
    error = ModelError("known", code="known")
    with pytest.raises(ModelError) as caught, explained(lambda event: None):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("shown", [False, True])
def test_a_job_that_breaks_shows_no_traceback(tmp_path, monkeypatch, capsys, shown):
    monkeypatch.setattr(pipeline, "read_windows", lambda task: [][0])
    if shown:
        monkeypatch.setenv(TRACEBACK, "1")
    folder = tiny_model(tmp_path / "model")
    command = ["--model_dir", folder, "--output_dir", tmp_path / "out", "--quant_scheme", "int8_weight_only", "--json"]
    command += ["--seq_len", "64", "--num_calib_data", "2"]
    assert cli.main(list(map(str, command))) == 1
    said = capsys.readouterr()
    failed = json.loads(said.out.splitlines()[-1])
    assert (failed["kind"], failed["code"]) == ("failed", "unexpected_error")
    assert "in the phase 'quantize': IndexError: list index out of range" in failed["message"]
    assert ("Traceback" in said.err) == shown and "Traceback" not in said.out
    assert not Path(tmp_path / "out").exists()
