"""``quantize MODEL A,B``: a result of each preset, of which one that fails leaves the others."""

import json
import os

import pytest
from gguf import GGUFReader

from quantcore.cli.main import main
from quantcore.engine.pipeline import job as pipeline
from quantcore.errors import QuantError
from tests.support.models import tiny_model

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

FAST = ["--num_calib_data", "4", "--seq_len", "64", "--num_eval_data", "3", "--eval_seq_len", "64"]


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path / "Model")


def quantize(model, presets, out, *flags):
    return main(["quantize", str(model), presets, "-o", str(out), *FAST, *flags])


def test_each_preset_has_a_proven_result(tmp_path, model, capsys):
    out = tmp_path / "out"
    assert quantize(model, "q4_0,Q8_0, w4a16", out) == 0
    types = {}
    for name in ("Q4_0", "Q8_0"):
        reader = GGUFReader(out / name / f"Model-{name}.gguf")
        types[name] = {each.name: each.tensor_type.name for each in reader.tensors}["blk.0.attn_q.weight"]
        assert json.loads((out / name / "report.json").read_text())["proof"]
    assert types == {"Q4_0": "Q4_0", "Q8_0": "Q8_0"}
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row for row in rows if row and row[0] in ("Q4_0", "Q8_0", "w4a16") and "MB" in row}
    assert len(shown) == 3 and {path.name for path in out.iterdir()} == {"Q4_0", "Q8_0", "w4a16", "results.json"}


def test_a_failure_leaves_the_others_and_is_tried_again(tmp_path, model, capsys, monkeypatch):
    out, run = tmp_path / "out", pipeline.run

    def failing(task, *more):
        if task.output_dir.name == "gguf_q4_0":
            raise QuantError("The power is out.", code="test")
        return run(task, *more)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "run", failing)
        assert quantize(model, "gguf_q4_0,Q8_0", out) == 1
    said = capsys.readouterr()
    assert "Failed: gguf_q4_0." in said.err and "The power is out." in said.err
    assert (out / "Q8_0/MANIFEST.json").is_file() and not (out / "gguf_q4_0").exists()
    before = (out / "Q8_0/report.json").stat().st_mtime_ns
    assert quantize(model, "gguf_q4_0,Q8_0", out) == 0
    assert (out / "gguf_q4_0/model.gguf").is_file() and (out / "Q8_0/report.json").stat().st_mtime_ns == before


def test_a_result_of_another_job_is_not_taken_for_this_one(tmp_path, model, capsys):
    out = tmp_path / "out"
    assert quantize(model, "Q4_0,Q8_0", out) == 0
    assert quantize(model, "Q4_0,Q8_0", out, "--effort", "fast") == 1
    assert "Q4_0 is not empty" in capsys.readouterr().err.replace("\n", "")
    weights = model / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert quantize(model, "Q4_0,Q8_0", out) == 1


@pytest.mark.parametrize(
    ("presets", "part"),
    [("Q4_0,q4_0", "Q4_0 is named twice"), ("Q4_0,Q9_0", "Unknown preset 'Q9_0'")],
)
def test_a_list_that_makes_no_sense_is_refused_before_any_work(tmp_path, model, capsys, presets, part):
    assert quantize(model, presets, tmp_path / "out") == 1
    assert part in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_commands_of_one_result_say_that_they_take_one_preset(model, capsys):
    assert main(["plan", str(model), "Q4_0,Q8_0"]) == 1
    assert "names several presets" in capsys.readouterr().err


def test_ranks_have_one_preset(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert quantize(model, "Q4_0,Q8_0", tmp_path / "out") == 1
    assert "torchrun started several" in capsys.readouterr().err
