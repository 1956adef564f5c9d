"""A model quantized in one call: the result, its shapes for notebooks, and errors in place of an exit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantcore
from quantcore.cli.main import asked_of
from quantcore.cli.notebook import quantize
from quantcore.errors import ConfigError, ModelError
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("notebook") / "model")


def test_a_model_is_quantized_in_one_call(model: Path, tmp_path: Path) -> None:
    assert quantcore.quantize is quantize
    result = quantize(
        model, "int8_weight_only", output=tmp_path / "out", num_eval_data=2, eval_seq_len=64,
        exclude_layers=["*o_proj"], file2file_quantization=False,
    )  # fmt: skip
    assert result.folder == tmp_path / "out" and (result.folder / "model.safetensors").is_file()
    names = {layer.name for layer in result.report.layers}
    assert names and not any("o_proj" in name for name in names)
    assert repr(result).startswith(f"{tmp_path / 'out'}: ") and " MB -> " in repr(result)
    html = result._repr_html_()
    assert html.startswith("<iframe srcdoc=") and "<script" not in html and '"<' not in html
    table = result.to_pandas()
    assert set(table.index) == names and "relative_error" in table
    assert not list(tmp_path.glob(".*")), "nothing is left of the progress"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"efort": "best"}, "There is no flag --efort. Did you mean --effort?"),
        ({"effort": "most"}, "Argument --effort: unknown value 'most'. Available: fast, balanced, best."),
        ({"quant_scheme": "fp8"}, "The preset is given twice: w4a16, and --quant_scheme fp8"),
    ],
)
def test_wrong_settings_are_errors(model: Path, settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        quantize(model, "w4a16", **settings)
    assert said in raised.value.message and raised.value.code == "invalid_settings"


@pytest.mark.parametrize("presets", ["Q4_K_M,Q8_0", ["Q4_K_M", "Q8_0"]])
def test_several_presets_are_answered_with_a_line_that_takes_them(model: Path, presets: Any) -> None:
    with pytest.raises(ConfigError, match="takes one preset") as raised:
        quantize(model, presets)
    assert "quantcore.quantize(model, preset) for preset in ('Q4_K_M', 'Q8_0')" in str(raised.value.hint)


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        quantize(tmp_path / "nowhere", "w4a16")


def test_a_goal_takes_the_settings_of_auto(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    def note(command: str, arguments: list[str]) -> None:
        seen.append((command, arguments))
        asked_of(command, arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr("quantcore.cli.notebook.asked_of", note)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, runtime="vllm", device="24GB", min_recovery="97%", output="o")
    flags = ["--runtime", "vllm", "--device", "24GB", "--min_recovery", "97%"]
    assert seen == [("auto", [str(model), "-o", "o", *flags])]
