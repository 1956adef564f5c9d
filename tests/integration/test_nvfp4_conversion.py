"""MXFP4 weights become NVFP4 without a change of any value, or are refused with the share that does not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantcore.cli.main import main
from quantcore.engine.commands.convert import convert
from quantcore.engine.containers.dequantize import open_source
from quantcore.engine.pipeline.job import run
from quantcore.errors import ConfigError
from quantcore.events import silence
from quantcore.importing.model import read_model
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.proofs import proving_here

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    model = tiny_model(folder / "model")
    with proving_here():
        run(task(model, folder / "out", "mxfp4_weight_only", ["compressed_tensors"], file2file=True), silence)
    return folder / "out"


def with_smallest_scale(mxfp4: Path, folder: Path, *, of_zeros: bool) -> Path:
    """Return a copy in which one block has the scale 2^-60."""
    shutil.copytree(mxfp4, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q_PROJ}.weight_scale"][3, 1] = 127 - 60
    if of_zeros:
        tensors[f"{Q_PROJ}.weight_packed"][3, 16:32] = 0x80  # 0 and -0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("export", ["compressed_tensors", "modelopt"])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_every_value_stays(mxfp4: Path, tmp_path: Path, export: str, has_zeros: bool) -> None:
    source = with_smallest_scale(mxfp4, tmp_path / "zeros", of_zeros=True) if has_zeros else mxfp4
    convert(source, tmp_path / "out", export, silence, with_nvfp4=True)
    before, after = read_model(source), read_model(tmp_path / "out")
    assert after.quantized is not None
    assert {(str(layer.weight.scale_type), layer.weight.group_size) for layer in after.quantized.layers.values()} == {
        ("e4m3", 16)
    }
    old, new = open_source(before), open_source(after)
    assert old.tensors.keys() == new.tensors.keys()
    for name in old.tensors:
        values = old.read(name)
        assert torch.equal(values, new.read(name))
        assert torch.equal(values.signbit(), new.read(name).signbit()), "-0 stays -0"


def test_layers_that_vllm_fuses_share_their_global_scale(mxfp4: Path, tmp_path: Path) -> None:
    convert(mxfp4, tmp_path / "out", "compressed_tensors", silence, with_nvfp4=True)
    written = load_file(tmp_path / "out/model.safetensors")
    parts = [written[f"{Q_PROJ.removesuffix('q_proj')}{part}_proj.weight_global_scale"] for part in "qkv"]
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])


def test_transformers_computes_the_same(mxfp4: Path, tmp_path: Path) -> None:
    """Transformers with compressed-tensors decompresses both formats by its own code."""
    convert(mxfp4, tmp_path / "out", "compressed_tensors", silence, with_nvfp4=True)
    ids = torch.arange(24)[None]
    first, second = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits
        for folder in (mxfp4, tmp_path / "out")
    )
    assert torch.equal(first, second)


def test_blocks_that_do_not_fit_are_counted(mxfp4: Path, tmp_path: Path) -> None:
    source = with_smallest_scale(mxfp4, tmp_path / "small", of_zeros=False)
    with pytest.raises(ConfigError, match=r"^1 of \d+ blocks \(0\.0\d%\) cannot be written as NVFP4") as caught:
        convert(source, tmp_path / "out", "compressed_tensors", silence, with_nvfp4=True)
    assert f"{Q_PROJ} (1)" in caught.value.message
    assert caught.value.code == "not_lossless"
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_can_convert(mxfp4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(mxfp4), "-o", str(tmp_path / "out"), "--to", "compressed_tensors"]
    assert main(command) == 1
    assert "already in the compressed_tensors format" in capsys.readouterr().err
    assert main([*command, "--nvfp4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == "completed"
    assert main(["convert", str(tmp_path / "out"), "-o", str(tmp_path / "again"), "--to", "modelopt", "--nvfp4"]) == 1
    assert "has no MXFP4 weights" in capsys.readouterr().err
