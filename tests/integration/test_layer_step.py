"""The step that gives the worst layers more bits: its flags, its config and its size are those of a real job."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from quantcore.cli.flags import parser
from quantcore.cli.from_flags import task_of
from quantcore.config.quark import read_config
from quantcore.engine.pipeline.job import run
from quantcore.report.quality import Step
from quantcore.report.values import Report
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.proofs import proving_here


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def report_of(model: Path, out: Path, **changes: object) -> Report:
    with proving_here():
        report = run(task(model, out, "w4a16").model_copy(update=changes), lambda event: None)
    assert report is not None
    return report


def step_of(report: Report) -> Step:
    assert report.more_bits is not None
    return report.more_bits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """A result of w4a16 with GPTQ, as a preset makes it, and its folder."""
    out = tmp_path_factory.mktemp("first") / "out"
    flags = parser().parse_args(["--model_dir", str(model), "--output_dir", str(out), "--quant_scheme", "w4a16"])
    wanted = task_of(flags)
    return report_of(model, out, config=wanted.config, export=wanted.export), out


def test_layers_are_ranked_by_the_error_of_their_output_and_have_sizes(first: tuple[Report, Path]) -> None:
    report, out = first
    errors = [layer.output_error or 0.0 for layer in report.ranked_layers]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0
    assert report.ranked_layers[0].name == report.summary.worst_layer.name
    assert sum(layer.bytes or 0 for layer in report.layers) < weights_bytes(out)
    assert all(layer.bits is not None and 4 < layer.bits < 6 for layer in report.layers)  # 4, scales and zero points


def test_the_step_does_what_it_says(first: tuple[Report, Path], model: Path, tmp_path: Path) -> None:
    report, out = first
    step = step_of(report)
    words = ["--model_dir", str(model), "--output_dir", str(tmp_path / "finer"), *shlex.split(step.flags)]
    wanted = task_of(parser().parse_args(words))
    assert wanted.config == read_config(step.changes["config"])
    assert list(wanted.export) == step.changes["export"] == ["compressed_tensors"]  # awq holds 4 bits alone
    finer = report_of(model, tmp_path / "finer", config=wanted.config, export=wanted.export)
    named = [words[place + 1] for place, word in enumerate(words) if word == "--layer_quant_scheme"]
    worst = [layer.name for layer in report.ranked_layers]
    assert worst[0] in named and len(named) >= 4
    assert {layer.name for layer in finer.layers if layer.scheme.startswith("int8")} == set(named)
    before, after = ({layer.name: layer.bytes or 0 for layer in each.layers} for each in (report, finer))
    more = sum(after[name] - before[name] for name in named)
    assert f"+{more / 1e6:.1f} MB" in step.text
    assert finer.more_bits is None  # no preset any more: its flags are not known
    assert weights_bytes(tmp_path / "finer") > weights_bytes(out)


def test_a_result_whose_outputs_were_not_measured_has_no_step(model: Path, tmp_path: Path) -> None:
    report = report_of(model, tmp_path / "out")
    assert report.more_bits is None and all(layer.output_error is None for layer in report.layers)
