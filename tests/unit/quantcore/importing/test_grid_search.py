"""The grids of whole models: dequantized ones, quantized files by their headers, and models whose weights are away."""

from pathlib import Path

import pytest
import torch

from quantcore.config import presets
from quantcore.formats.grid import GridShare
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import read_model
from tests.support.grids import on_grids
from tests.support.models import tiny_model
from tests.support.reading import quantize


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def grids_of(folder: Path) -> dict[str, float]:
    return {str(share.grid): share.share for share in with_grids(read_model(folder)).headers.grids}


def test_a_random_model_lies_on_none_and_nothing_is_said(model: Path) -> None:
    given = read_model(model)
    assert with_grids(given) is given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_shares_are_those_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny_model(tmp_path / "model", dtype=dtype)
    on_grids(folder, {"down_proj": "gguf_q8_0", "_proj": "gguf_q4_1"})
    in_all = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128
    eighth = 64 * 128 / in_all
    expected = {"Q4_1, groups of 32": 1 - eighth, "8 bits, symmetric, groups of 32": eighth}
    assert grids_of(folder) == pytest.approx(expected)


def test_the_rest_of_the_weights_counts(model: Path) -> None:
    found = grids_of(on_grids(model, {"up_proj": "int4_wo_32"}))
    assert found == {
        "4 bits, symmetric, groups of 32": pytest.approx(64 * 128 / (4 * 64 * 64 - 64 * 64 + 3 * 64 * 128))
    }


def test_a_warning_says_what_it_means(model: Path) -> None:
    headers = with_grids(read_model(on_grids(model, {"_proj": "uint4_wo_32"}))).headers
    assert [share.to_dict() for share in headers.grids] == [
        {"name": "asymmetric", "bits": 4, "scope": "group", "group_size": 32, "share": 1.0,
         "title": "4 bits, asymmetric, groups of 32"}
    ]  # fmt: skip
    assert headers.warnings[-1].startswith(
        "The weights already lie on a grid of few levels: 4 bits, asymmetric, groups of 32 (100 %). A scheme with "
        "the same levels is lossless here. Quality is measured against this model"
    )


@pytest.mark.parametrize(
    ("preset", "export", "expected"),
    [
        ("w4a16", "awq", "4 bits, asymmetric, groups of 32"),
        ("fp8", "fp8", "fp8_e4m3, one scale per tensor"),
        ("mxfp4", "quark", "MXFP4, groups of 32"),
        ("gguf_q4_1", "gguf", "Q4_1, groups of 32"),
        ("gguf_iq4_nl", "gguf", "IQ4_NL, groups of 32"),
        ("gguf_nvfp4", "gguf", "NVFP4, groups of 16"),
    ],
)
def test_quantized_files_say_it_in_their_headers(model: Path, preset: str, export: str, expected: str) -> None:
    group_size = 32 if preset == "w4a16" else None
    out = model.parent / "out"
    quantize(model, out, presets.resolve(preset, group_size=group_size), export)
    assert grids_of(out) == {expected: 1.0}


def test_holes_in_place_of_weights_say_nothing(model: Path) -> None:
    """So an outline of a model on the Hub looks."""
    on_grids(model, {"_proj": "w4a16"})
    file = model / "model.safetensors"
    size, header = file.stat().st_size, file.read_bytes()
    length = 8 + int.from_bytes(header[:8], "little")
    with file.open("wb") as hollow:
        hollow.write(header[:length])
        hollow.truncate(size)
    assert grids_of(model) == {}


def test_what_the_report_says_of_a_share() -> None:
    from quantcore.formats.grid import Grid

    assert str(GridShare(Grid("MXFP4", 4, "group", 32), 0.256)) == "MXFP4, groups of 32 (26 %)"
