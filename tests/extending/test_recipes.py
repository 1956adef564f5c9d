"""The recipes of docs/extending, followed as they stand: each package is built, installed and used."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.forks import forked
from tests.support.models import tiny_model
from tests.support.packages import ROOT, blocks_of, files_of, install, run_python, write_files

PACKAGES = ("dtype", "observer", "algorithm", "exporter")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: those of all recipes."""
    folder = tmp_path_factory.mktemp("installed")
    install([write_files(tmp_path_factory.mktemp(page), files_of(page)) for page in PACKAGES], folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=1, max_position_embeddings=1024)


def report_of(page: str, installed: Path, model: Path, folder: Path) -> dict[str, object]:
    """Run the command of a recipe in ``folder``; the report of the result in ``out``."""
    (folder / "model").symlink_to(model)
    write_files(folder, {name: text for name, text in files_of(page).items() if name == "config.json"})
    [command] = blocks_of(page, "sh")
    program, verb, *flags = shlex.split(command)
    assert (program, verb) == ("bitfoundry", "quantize")
    ran = run_python(installed, "-m", "quantcore", *flags, cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report: dict[str, object] = json.loads((folder / "out" / "report.json").read_text())
    return report


def schemes_of(report: dict[str, object]) -> set[str]:
    layers = report["layers"]
    assert isinstance(layers, list) and layers
    return {layer["scheme"] for layer in layers}


@pytest.mark.slow
def test_a_dtype(installed: Path, model: Path, tmp_path: Path) -> None:
    report = report_of("dtype", installed, model, tmp_path)
    assert schemes_of(report) == {"pot4 per_group 32"}


@pytest.mark.slow
def test_an_observer(installed: Path, model: Path, tmp_path: Path) -> None:
    report = report_of("observer", installed, model, tmp_path)
    assert report["config"]["global_quant_config"]["input_tensors"]["observer_cls"] == "PerTensorTightObserver"  # type: ignore[index]


@pytest.mark.slow
def test_an_algorithm(installed: Path, model: Path, tmp_path: Path) -> None:
    report = report_of("algorithm", installed, model, tmp_path)
    assert [one["name"] for one in report["config"]["algo_config"]] == ["dither"]  # type: ignore[index]


def test_an_algorithm_in_this_process(model: Path, tmp_path: Path) -> None:
    """In a fork of it, where the algorithm stays."""
    (tmp_path / "model").symlink_to(model)
    blocks = blocks_of("algorithm", "python")
    assert len(blocks) == 2

    def follow(_: int) -> int:
        os.chdir(tmp_path)
        exec("\n".join(blocks), {"__name__": "__main__"})
        return 0

    assert forked(follow, 1, tmp_path) == [0], (tmp_path / "err.0").read_text()
    assert "7 layers" in (tmp_path / "out.0").read_text()
    assert len(blocks[0].split("\n\n")[1].strip().splitlines()) <= 10


@pytest.mark.slow
def test_an_exporter(installed: Path, model: Path, tmp_path: Path) -> None:
    report_of("exporter", installed, model, tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "plain_codes"
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[:20000]
    assert b"weight_codes" in header and b"weight_scale" in header


@pytest.mark.slow
def test_all_of_them_together(installed: Path, model: Path, tmp_path: Path) -> None:
    """One job with the dtype, the observer, the algorithm and the exporter of four packages."""
    weight = {"dtype": "pot4", "qscheme": "per_group", "group_size": 32, "observer_cls": "PerGroupTightObserver"}
    config = {"global_quant_config": {"weight": weight}, "exclude": ["lm_head"], "algo_config": [{"name": "dither"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = "--output_dir out --quant_scheme config.json --model_export plain_codes --num_calib_data 2 --seq_len 16"
    ran = run_python(installed, "-m", "quantcore", "--model_dir", str(model), *flags.split(), cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert schemes_of(report) == {"pot4 per_group 32"}


def test_what_they_are_is_readable_without_torch(installed: Path) -> None:
    """The API validates configs and describes them, and makes plans for the exporter."""
    code = """
import json, sys
from quantcore.config.quantization import json_schema, parse_config
from quantcore.export import EXPORTERS, formats_for
weight = {"dtype": "pot4", "qscheme": "per_group", "group_size": 32, "observer_cls": "PerGroupTightObserver"}
config = parse_config({"global_quant_config": {"weight": weight}, "algo_config": [{"name": "dither", "seed": 3}]})
assert parse_config(json.loads(json.dumps(config.to_dict()))) == config
assert formats_for(config) == ["plain_codes", "fake_quantized"], formats_for(config)
schema = json.dumps(json_schema())
assert '"pot4"' in schema and '"DitherConfig"' in schema and '"strength"' in schema
assert "torch" not in sys.modules
import torch
from quantcore import QuantizationSpec, observer_for
observer = observer_for(QuantizationSpec("int8", observer_cls="PerTensorTightObserver"))
observer.update(torch.arange(101.0)[None])
assert torch.allclose(observer.range()[1], torch.tensor(99.0)), observer.range()
"""
    ran = run_python(installed, "-c", code)
    assert ran.returncode == 0, ran.stderr


def test_the_command_names_them(installed: Path) -> None:
    text = run_python(installed, "-m", "quantcore", "--help").stdout
    assert "dither" in text and "plain_codes" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", PACKAGES)
def test_the_conformance_tests_cover_them(installed: Path, page: str) -> None:
    """The command that each recipe shows. From the root of the checkout, whose settings pytest reads."""
    [command] = re.findall(r"`python -m (pytest .+?)`", (ROOT / "docs" / "extending" / f"{page}.md").read_text())
    ran = run_python(installed, "-m", *command.split(), "-q", "-p", "no:cacheprovider", cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-3000:]
