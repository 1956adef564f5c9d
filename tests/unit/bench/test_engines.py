"""The parts of ``make bench-engines`` that need no other engine: cells, windows, results, table, quality."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bench.engines.__main__ as engines
from bench.engines.__main__ import measure
from bench.engines.cells import (
    ALGORITHMS,
    ENGINES,
    ESTIMATES_S,
    FLOAT,
    MISSING,
    SCHEMES,
    USUAL,
    Cell,
    all_cells,
    chosen,
)
from bench.engines.inputs import cut_model, cut_windows
from bench.engines.results import Results
from bench.engines.runner import Clock, Job, peak_bytes, quality
from bench.engines.table import markdown, ratio
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig
from tests.support.models import tiny_tokenizer

SETTINGS = {"model": "m", "text": "t", "num_samples": 2, "num_windows": 3, "seq_len": 16, "tokens_sha256": "a"}


def row(value: float, cpu_s: float = 10.0, **more: Any) -> dict[str, Any]:
    step = {"cpu_s": cpu_s, "wall_s": 2 * cpu_s, "peak_bytes": 500_000_000}
    return {"status": "ok", "perplexity": value, "quantize": step, "load_average": 0.5, **more}


def test_every_cell_exists_or_says_why_not_and_knows_its_cost() -> None:
    cells = list(all_cells())
    assert len(cells) == 1 + (len(ENGINES) - 1) * len(SCHEMES) * len(ALGORITHMS)
    assert all(cell.estimate_s > 0 for cell in cells)
    assert {cell.engine for cell in cells if cell.missing is None} == set(ENGINES)
    for engine, scheme, algorithm, reason in MISSING:
        hit = [cell for cell in cells if cell.missing == reason]
        assert hit, f"{engine} {scheme} {algorithm}: a row that says nothing about any cell"
    assert {engine for engine, _ in ESTIMATES_S} == set(ENGINES)
    cost = {engine: Cell(engine, "uint4", "awq").estimate_s for engine in ENGINES if engine != FLOAT}
    assert len(set(cost.values())) == len(cost), "each engine has costs of its own"


def test_what_is_usual_is_there() -> None:
    names = {cell.name for cell in all_cells()}
    assert set(USUAL) <= names
    assert all(Cell("ours", *name.split(":")).missing is None for name in USUAL)


def test_choosing_cells() -> None:
    cells = chosen(["int*:gptq"], ["ours", "gptqmodel"])
    assert [(cell.engine, cell.name) for cell in cells] == [
        (FLOAT, "float:none"),
        ("ours", "int4:gptq"),
        ("gptqmodel", "int4:gptq"),  # and no int8, which it does not have
        ("ours", "int8:gptq"),
        ("ours", "int8_dynamic:gptq"),
    ]
    with pytest.raises(ValueError, match="'int5:\\*' fits no cell"):
        chosen(["uint4:*", "int5:*"], ["ours"])


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a checkpoint of three blocks of one tensor each."""
    folder = tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    config = {"model_type": "qwen2", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.embed_tokens.weight", *(f"model.layers.{index}.w" for index in range(3))]
    save_file({name: torch.full((2,), float(index)) for index, name in enumerate(names)}, folder / "model.safetensors")
    return folder


def test_the_windows_are_those_that_the_engine_cuts(model_dir: Path, tmp_path: Path) -> None:
    from quantcore.config.presets import PRESETS
    from quantcore.config.quantization import Config
    from quantcore.config.task import Task
    from quantcore.engine.pipeline.job import read_windows

    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number * number % 9973) for number in range(4000)))
    calibration = CalibrationConfig(source=str(text), num_samples=4, seq_len=16)
    file = tmp_path / "windows.safetensors"
    first = cut_windows(model_dir, file, calibration, EvaluationConfig(num_windows=5, seq_len=32))
    windows = load_file(file)
    assert windows["calibration"].shape == (4, 16) and windows["held_out"].shape == (5, 32)

    config: Config = PRESETS["w4a16"].config
    evaluation = EvaluationConfig(num_windows=5, seq_len=32)
    task = Task(model_dir=model_dir, output_dir=tmp_path, config=config, calibration=calibration, evaluation=evaluation)
    assert torch.equal(read_windows(task).calibration_NT, windows["calibration"])
    assert torch.equal(read_windows(task).held_out_NT, windows["held_out"])

    assert cut_windows(model_dir, file, calibration, evaluation, num_more=3) == first
    cut = load_file(file)
    more = set(map(tuple, cut["more"].tolist()))
    assert len(more) == 3 and not more & set(map(tuple, cut["calibration"].tolist()))
    assert torch.equal(cut["calibration"], windows["calibration"])

    other = calibration.model_copy(update={"seed": 1})
    assert cut_windows(model_dir, file, other, EvaluationConfig(num_windows=5, seq_len=32)) != first


def test_a_cut_of_a_model(model_dir: Path, tmp_path: Path) -> None:
    cut_model(model_dir, tmp_path / "cut", 2)
    assert set(load_file(tmp_path / "cut" / "model.safetensors")) == {
        "model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w",
    }  # fmt: skip
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["layer_types"] == ["full_attention"] * 2
    assert (tmp_path / "cut" / "tokenizer.json").is_file()


class Guesser(nn.Module):
    """Gives the right next token of ``ids`` the share ``p``, all others the same."""

    def __init__(self, p: float, vocabulary: int) -> None:
        super().__init__()
        self.p, self.vocabulary = p, vocabulary

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        shares = torch.full((*input_ids.shape, self.vocabulary), (1 - self.p) / (self.vocabulary - 1))
        shares[:, :-1].scatter_(-1, input_ids[:, 1:, None], self.p)
        return SimpleNamespace(logits=shares.log().bfloat16() if self.p == 0.25 else shares.log())


@pytest.fixture
def guessed(tmp_path: Path) -> Job:
    """The job of a cell whose float model gives the right token the share 1/2."""
    ids_NT = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(0))
    save_file({"calibration": ids_NT, "held_out": ids_NT.clone()}, tmp_path / "windows")
    logits = tmp_path / "logits"
    logits.mkdir()
    for window, ids_T in enumerate(ids_NT):
        of_window_TV = Guesser(0.5, 50)(ids_T[None], False).logits[0, :-1]
        save_file({"logits": of_window_TV.contiguous()}, logits / f"{window}.safetensors")
    return Job(tmp_path, tmp_path / "windows", logits, "uint4", "rtn", tmp_path / "s", tmp_path / "r")


def test_perplexity_is_one_over_the_share_of_the_right_token(guessed: Job) -> None:
    assert quality(Guesser(0.5, 50), guessed)["perplexity"] == pytest.approx(2.0, rel=1e-4)
    assert quality(Guesser(0.25, 50), guessed)["perplexity"] == pytest.approx(4.0, rel=1e-2)  # logits of 8 bits
    assert quality(Guesser(1 / 50, 50), guessed)["perplexity"] == pytest.approx(50.0, rel=1e-4)


def test_divergence_from_the_float_model(guessed: Job) -> None:
    same, other = quality(Guesser(0.5, 50), guessed), quality(Guesser(0.8, 50), guessed)
    assert (same["kl"], same["top1"]) == (pytest.approx(0, abs=1e-6), 1)
    assert other["kl"] == pytest.approx(0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2), abs=1e-4)
    wrong = quality(Guesser(0.01, 50), guessed)  # less than the 49 others have
    assert wrong["top1"] == 0 and wrong["kl"] > 1


def test_the_clock_sees_work_and_memory() -> None:
    with Clock() as clock:
        held = torch.ones(60_000_000)
        math.fsum(range(200_000))
    assert held.numel() == 60_000_000
    assert 0 < clock.seen["cpu_s"] <= clock.seen["wall_s"] + 0.5
    assert clock.seen["peak_bytes"] >= clock.seen["peak_before_bytes"]
    assert clock.seen["peak_bytes"] > 240_000_000


def test_a_large_parent_does_not_count(tmp_path: Path) -> None:
    code = "from bench.engines.runner import peak_bytes; print(peak_bytes())"
    held = torch.ones(500_000_000 // 4)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert held.nbytes < peak_bytes()
    assert int(ran.stdout) < held.nbytes


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "w", tmp_path / "l", "uint4", "rotation+gptq", tmp_path / "s", tmp_path / "r")
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.algorithms == ["rotation", "gptq"]


def test_results_go_on_where_they_stopped(tmp_path: Path) -> None:
    file = tmp_path / "results" / "engines.json"
    good, bad = Cell("ours", "uint4", "rtn"), Cell("quark", "uint4", "rtn")
    results = Results(file, SETTINGS)
    results.add(good, row(30.0))
    results.add(bad, {"status": "failed", "load_average": 1.0, "error": "no\nsuch luck"})
    again = Results(file, dict(SETTINGS))
    assert again.todo([good, bad]) == [bad]
    again.add(bad, row(31.0))
    assert [(found["engine"], found["status"]) for found in Results(file, SETTINGS).data["rows"]] == [
        ("ours", "ok"),
        ("quark", "ok"),
    ]
    assert sorted(path.name for path in file.parent.iterdir()) == ["engines.json", "engines.md"]
    with pytest.raises(ValueError, match="other settings \\(tokens_sha256\\)"):
        Results(file, SETTINGS | {"tokens_sha256": "b"})


def test_rows_of_two_machines_are_never_held_against_each_other(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    results = Results(file, SETTINGS)
    ours, quark, other = (Cell("ours", "uint4", "rtn"), Cell("quark", "uint4", "rtn"), Cell("ours", "uint4", "gptq"))
    for cell in (ours, other):
        results.add(cell, row(30.0, cpu_s=5.0))
    found = json.loads(file.read_text())
    for one in found["rows"]:
        one["machine"] = "an older one"
    file.write_text(json.dumps(found))
    results = Results(file, SETTINGS)
    assert results.todo([ours, other]) == []
    assert results.todo([quark, other]) == [ours, quark], "ours is measured on this machine, too"
    results.add(quark, row(25.0, cpu_s=20.0))
    page = file.with_suffix(".md").read_text()
    assert "A: an older one; B: " in page and "| 20.0 | 40.0 | 500 |  |  |  | 0.5 | B |" in page
    assert "Aims that are missed" not in page
    results.add(ours, row(30.0, cpu_s=5.0))
    page = file.with_suffix(".md").read_text()
    assert "| 20.0 | 40.0 | 500 | 1.200 | 0.250 | 1.000 | 0.5 | B |" in page
    assert page.count("| quantcore | 30.000 |") == 3, "on both machines in one cell, on the older one in the other"
    assert results.todo([quark]) == [] == results.todo([other])


def test_missed_aims_are_told_with_the_reason(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", SETTINGS)
    results.add(Cell("ours", "uint4", "rtn"), row(30.0, cpu_s=6.0))
    results.add(Cell("quark", "uint4", "rtn"), row(31.0, cpu_s=10.0))
    results.add(Cell("llmcompressor", "uint4", "rtn"), row(29.0, cpu_s=20.0))
    page = (tmp_path / "r.md").read_text().partition("## Aims that are missed")[2]
    assert "best peer's: uint4:rtn 1.034." in page and "fastest peer: uint4:rtn 0.600. Ours includes" in page
    results.add(Cell("ours", "uint4", "rtn"), row(28.0, cpu_s=4.0))
    assert "fastest peer" not in (tmp_path / "r.md").read_text()


def test_the_page_says_which_grid_the_model_lay_on() -> None:
    results: dict[str, Any] = {"date": "d", "settings": SETTINGS, "rows": []}
    assert "was not looked at" in markdown(results)
    assert "on no grid" in markdown(results | {"settings": SETTINGS | {"grids": []}})
    named = markdown(results | {"settings": SETTINGS | {"grids": ["Q4_1, groups of 32 (100 %)"]}})
    assert "Its weights lie on a grid: Q4_1, groups of 32 (100 %)." in named


def test_two_runs_may_write_to_one_file(tmp_path: Path) -> None:
    one, other = (Results(tmp_path / "r.json", SETTINGS) for _ in range(2))
    one.add(Cell("ours", "uint4", "rtn"), row(30.0))
    other.add(Cell("quark", "uint4", "rtn"), row(31.0))
    one.add(Cell("ours", "uint4", "gptq"), row(29.0))
    found = Results(tmp_path / "r.json", SETTINGS).data["rows"]
    assert [(r["engine"], r["algorithm"]) for r in found] == [("ours", "rtn"), ("quark", "rtn"), ("ours", "gptq")]


def test_the_table_holds_ours_against_each_peer(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", SETTINGS)
    results.add(Cell(FLOAT, FLOAT, "none"), row(20.0))
    results.add(Cell("ours", "uint4", "rtn"), row(22.0, cpu_s=5.0, kl=0.125, top1=0.75))
    results.add(Cell("quark", "uint4", "rtn"), row(25.0, cpu_s=20.0, note="in a hurry"))
    results.add(Cell("ours", "int8", "rtn"), row(21.0))
    results.add(Cell("quark", "int8", "rtn"), {"status": "failed", "load_average": 1.0, "error": "no\nsuch luck"})
    lines = markdown(results.data).splitlines()
    assert "| quantcore | 22.000 | +10.0 % | 0.12500 | 0.750 | 5.0 | 10.0 | 500 |  |  |  | 0.5 | A |" in lines
    assert "| AMD Quark | 25.000 | +25.0 % |  |  | 20.0 | 40.0 | 500 | 0.880 | 0.250 | 1.000 | 0.5 | A |" in lines
    assert "- AMD Quark: in a hurry." in lines
    assert "- AMD Quark, int8:rtn: failed. `such luck`" in lines
    assert "- GPTQModel: it quantizes no inputs to int8 (int8:rtn)" in lines
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert len(widths) == 1, "a line with more or fewer columns than the head"


def test_no_ratio_without_two_numbers() -> None:
    assert ratio(row(20.0), row(10.0), "perplexity") == 2
    assert ratio({}, row(10.0), "perplexity") is None
    assert ratio(row(20.0), row(10.0, cpu_s=0.0), "quantize", "cpu_s") is None
    assert ratio(row(20.0), {"status": "failed"}, "quantize", "cpu_s") is None


@pytest.mark.slow
def test_a_process_that_fails_leaves_a_row_with_its_words(tmp_path: Path) -> None:
    inputs = {"model_dir": tmp_path / "nowhere", "windows": tmp_path / "none", "float_logits": tmp_path / "l"}
    found = measure(Cell(FLOAT, FLOAT, "none"), inputs, tmp_path, patience=10)
    assert found["status"] == "failed"
    assert str(tmp_path / "nowhere") in found["error"]


@pytest.mark.parametrize(("does", "starved"), [("while True: pass", 1e6), ("import time; time.sleep(600)", 2)])
def test_a_process_that_takes_too_long_is_ended(
    does: str, starved: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it computes, and some time after that if it only waits."""
    monkeypatch.setattr(engines, "START_S", 1)
    monkeypatch.setattr(engines, "STARVED", starved)
    real = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def other(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", does], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", other)
    inputs = {"model_dir": tmp_path, "windows": tmp_path / "none", "float_logits": tmp_path / "l"}
    row = measure(Cell(FLOAT, FLOAT, "none"), inputs, tmp_path, patience=0)
    assert (row["status"], row["error"].splitlines()[-1]) == ("timeout", "ended after 1 CPU s")
    assert started[0].returncode == -9
