"""A stopped job continues only if nothing that it reads has changed."""

import os

import pytest

from quantcore.config import presets
from quantcore.config.quantization import parse_config
from quantcore.config.task import Task
from quantcore.engine.blockwise.savepoint import fingerprint


@pytest.mark.parametrize("changed", ["imatrix", "text", "eval", "prompts", "config.json", "model.safetensors"])
def test_a_changed_file_is_another_job(tmp_path, changed):
    files = {name: tmp_path / name for name in ("imatrix", "text", "eval", "prompts")}
    files |= {name: tmp_path / "model" / name for name in ("config.json", "model.safetensors")}
    (tmp_path / "model").mkdir()
    for path in files.values():
        path.write_text("before")
    config = presets.resolve("Q4_K_M").to_dict() | {"algo_config": [{"name": "rtn", "imatrix": str(files["imatrix"])}]}
    task = Task(
        model_dir=tmp_path / "model",
        output_dir=tmp_path / "out",
        config=parse_config(config),
        calibration={"source": str(files["text"])},
        evaluation={"source": str(files["eval"]), "prompts": files["prompts"]},
    )
    before = fingerprint(task)
    assert fingerprint(task.model_copy(update={"output_dir": tmp_path / "elsewhere"})) == before
    time_ns = files[changed].stat().st_mtime_ns
    os.utime(files[changed], ns=(time_ns + 1, time_ns + 1))
    assert fingerprint(task) != before
