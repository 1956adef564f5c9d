"""The engine alone on Windows and macOS, as far as a Linux can tell (see ``tests.support.other_systems``)."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import quantcore
from quantcore.export.gguf.converted import MODULE
from tests.support.models import tiny_model
from tests.support.other_systems import folder_for
from tests.support.params import with_rare

ROOT = Path(__file__).parents[2]
SYSTEMS = ("win32", "darwin")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


def run(system, folder, *arguments):
    """A Python process that takes itself for one on ``system``: its output."""
    path = os.pathsep.join(map(str, (folder_for(system, folder), ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def source_of(place):
    file = place.with_suffix(".py")
    return (file if file.exists() else place / "__init__.py").read_text("utf-8")


@pytest.mark.parametrize("system", with_rare(SYSTEMS, ["darwin"]))
def test_every_module_of_the_engine_can_be_imported(system, tmp_path):
    """But those for Triton, which a GPU alone needs and which these systems do not have.

    The driver of llama.cpp's converter runs with the converter's folders on its path.
    """
    names = [one.name for one in pkgutil.walk_packages(quantcore.__path__, "quantcore.")]
    places = {name: ROOT / name.replace(".", "/") for name in names}
    needs_triton = {name for name, place in places.items() if "import triton" in source_of(place)}
    assert {name.rpartition(".")[0] for name in needs_triton} == {"quantcore.tensors.kernels"}
    modules = [name for name in places if "__main__" not in name and name not in {*needs_triton, MODULE}]
    code = f"""
import importlib
for name in {modules}:
    importlib.import_module(name)
import bitfoundry.commands.main, bitfoundry.client.service
from quantcore.engine.runtime import devices
from quantcore.serving import stopwatch
assert devices.sys.platform == {system!r}
del devices.os.environ["OMP_NUM_THREADS"]
assert devices.limit_threads() > 0 and 0 < devices.free_memory_bytes(devices.torch.device("cpu")) < 1 << 50
assert 1e8 < stopwatch._peak_memory_bytes() < 1e11, "macOS tells the peak in bytes, Linux in kB"
"""
    run(system, tmp_path, "-c", code)


JOBS = [(system, export) for system in SYSTEMS for export in ("quark", "gguf")]


@pytest.mark.parametrize(("system", "export"), with_rare(JOBS, JOBS[1:]))
def test_a_model_is_quantized_and_proven(system, export, model, tmp_path):
    (tmp_path / "out").mkdir()  # a folder that exists and is empty may be given
    scheme = {"quark": "fp8", "gguf": "gguf_q8_0"}[export]
    run(
        system, tmp_path, "-m", "bitfoundry", "quantize", "--model_dir", model, "--output_dir", "out", "--quant_scheme",
        scheme, "--model_export", export, "--num_calib_data", "4", "--seq_len", "64",
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert report["summary"]["perplexity_after"] > 1
    peak = report["summary"]["peak_memory_bytes"]
    assert 2e8 < peak < 2e10, "macOS tells the peak in bytes, Linux in kB"
