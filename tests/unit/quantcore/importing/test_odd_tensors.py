"""Files whose tensors do not belong together, through every reader and the plan: a named error, or they are read.

One tensor at a time is removed, renamed, made hollow, given another type or more axes, or a stranger is added.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.pipeline import job
from quantcore.errors import QuantError
from quantcore.importing.model import read_model
from tests.support.models import tiny_model
from tests.support.proofs import proving_here

FORMATS = [
    ("float", ""), ("fp8", "fp8"), ("fp8", "quark"), ("int8_dynamic", "compressed_tensors"),
    ("w4a16", "compressed_tensors"), ("w4a16", "awq"), ("w4a16", "quark"), ("nvfp4", "modelopt"),
    ("w4a16", "mlx"), ("mxfp4_weight_only", "mlx"),
]  # fmt: skip
STRANGERS = (
    "weight_scale", ".weight_scale", "x.weight_scale_inv", "lm_head.weight_scale", "model.norm.qweight", "x.g_idx",
    "model.layers.0.self_attn.q_proj.weight_scale", "model.layers.0.self_attn.q_proj.weight_packed",
    "model.layers.99.mlp.up_proj.weight_scale", "model.layers.0.input_layernorm.weight_scale", "a.weight_shape",
)  # fmt: skip
Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: dict[str, Change] = {
    "scalar": lambda tensor: torch.zeros(()),
    "hollow": lambda tensor: torch.zeros(0, dtype=tensor.dtype),
    "numbers": lambda tensor: torch.zeros(tensor.shape, dtype=torch.int64),
    "more axes": lambda tensor: torch.zeros((*tensor.shape, 3), dtype=tensor.dtype),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("odd") / "model")


def task_of(model: Path, output_dir: Path, preset: str, export: str) -> Task:
    group_size = 32 if preset.startswith("w4a16") else None
    return Task(
        model_dir=model, output_dir=output_dir, config=presets.resolve(preset, group_size=group_size),
        export=(export,), calibration={"num_samples": 2, "seq_len": 32},
        evaluation={"num_windows": 1, "seq_len": 32, "num_prompts": 0},
    )  # fmt: skip


def variants(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    kinds = {(name.rpartition(".")[2], ".layers." in name): name for name in tensors}
    for name in kinds.values():
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        yield f"{name} removed", others
        yield f"{name} renamed", others | {f"{name}_scale": tensors[name]}
        for what, change in CHANGES.items():
            yield f"{name}: {what}", others | {name: change(tensors[name])}
    for name in STRANGERS:
        for tensor in (torch.ones(()), torch.ones(4, 4), torch.ones(2, dtype=torch.int32)):
            yield f"{name} added", tensors | {name: tensor}


@pytest.mark.parametrize(("preset", "export"), FORMATS)
def test_every_reader_names_what_is_odd(preset: str, export: str, model: Path, tmp_path: Path) -> None:
    folder = model
    if export:
        folder = tmp_path / "out"
        with proving_here():
            job.run(task_of(model, folder, preset, export), lambda event: None)
    [file] = folder.glob("*.safetensors")
    odd, refused = tmp_path / "changed", 0
    shutil.copytree(folder, odd)
    for what, tensors in variants(load_file(file)):
        save_file(tensors, odd / file.name, {"format": "pt"})
        try:
            read_model(odd)
        except QuantError as error:
            refused += 1
            assert error.code != "unexpected_error", what
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error  # the traceback says where
    assert refused > (5 if export else -1)


@pytest.mark.parametrize(
    ("preset", "export", "part"),
    [("fp8", "fp8", "weight_scale"), ("fp8", "quark", "input_scale"), ("w4a16", "awq", "qweight")],
)
def test_a_name_that_the_format_needs_is_taken(
    preset: str, export: str, part: str, model: Path, tmp_path: Path
) -> None:
    """The plan says so: it was an error in the middle of the job, at the writing of that tensor."""
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    [file] = odd.glob("*.safetensors")
    save_file(load_file(file) | {f"model.layers.0.self_attn.q_proj.{part}": torch.ones(4)}, file, {"format": "pt"})
    with pytest.raises(QuantError, match=f"q_proj.{part}'") as refused:
        job.run(task_of(odd, tmp_path / "out", preset, export), lambda event: None)
    assert refused.value.code == "tensor_name_taken"
    assert not (tmp_path / "out").exists()
