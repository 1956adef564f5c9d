"""What ``explain`` says of the layers of a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bitfoundry.commands.main import run
from quantcore.report.quality import Step
from tests.support import reports
from tests.support.models import tiny_model

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
STEP = Step(text="Keep 4 layers in 8 bits: about +2.0 MB.", changes={}, flags="--quant_scheme w4a16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which input channel 7 of a layer is far larger than the others."""
    folder = tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    weights = load_file(folder / "model.safetensors")
    weights[f"{NAMES[1]}.weight"][:, 7] *= 50
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def result(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result whose layers have another order by their weights than by their outputs."""
    monkeypatch.setenv("COLUMNS", "160")
    written: dict[str, Any] = reports.report()
    errors = ((0.3, 0.01), (0.1, 0.08), (0.2, 0.05))
    written["layers"] = [
        reports.layer(name, "uint4")
        | {"relative_error": of_weight, "output_error": of_output, "num_weights": 1000, "bytes": 550}
        for name, (of_weight, of_output) in zip(NAMES, errors, strict=True)
    ]
    written["model"] = {"path": str(model), "model_type": "llama"}
    written |= {"more_bits": STEP.to_dict(), "clipping": {"q_proj input": 0.0012}}
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(written))
    return folder


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_layers_are_ranked_by_their_outputs_and_the_step_is_a_command(
    result: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = explained(capsys, str(result), "--limit", "2")
    first, second = (line for line in text.splitlines() if "model.layers" in line and "uint4" in line)
    assert NAMES[1] in first and NAMES[2] in second  # by weight errors the first was another
    assert "4.40" in first and "8.00%" in first
    assert "1 more layers: --limit 3 shows all." in text
    assert f"{STEP.text}\n  bitfoundry quantize {model} -o {result}-2 {STEP.flags}" in text
    found = json.loads(explained(capsys, str(result), "--json"))
    assert [layer["name"] for layer in found["layers"]] == [NAMES[1], NAMES[2], NAMES[0]]


def test_a_layer_shows_its_distribution_and_outlier_channels(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, str(result), "layers.0.self_attn.q_proj")
    assert "1 of 3, from the largest error" in text and "it clips 0.120% of q_proj inputs" in text
    bars = [line for line in text.splitlines() if " to " in line and line.rpartition(" ")[2][0].isdigit()]
    counts = [int(line.rpartition(" ")[2].replace(",", "")) for line in bars]
    assert sum(counts) == 64 * 64 and max(counts) == counts[len(counts) // 2]
    assert "relative to the median: 7 (" in text
    assert "none has a norm above 3 times" in explained(capsys, str(result), "up_proj")


@pytest.mark.parametrize(
    ("name", "message"), [("q_proj", "is the end of 2 names"), ("nothing", "There is no layer 'nothing'")]
)
def test_a_layer_that_is_not_one_is_refused(
    name: str, message: str, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", str(result), name]) == 1
    shown = capsys.readouterr().err
    assert message in shown and "Name one of: model.layers.0.self_attn.q_proj" in shown


def test_a_weight_that_is_not_here_is_said(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, str(result), "up_proj", "--model_dir", "/nowhere")
    assert "The weight is not shown: there is no model in /nowhere on this machine." in text
