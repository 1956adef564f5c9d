"""Fixtures of the tests that need programs in their own environments (``make consumers``)."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitfoundry.local import demo_model
from quantcore.formats import FORMATS
from tests.consumers import peers_inputs
from tests.consumers.peers_compare import Tensors
from tests.support import real_models
from tests.support.consumers import run_in
from tests.support.service_fixtures import (  # noqa: F401  fixtures
    get_job,
    make_model,
    server,
    sessions,
    settings,
    start_here,
    submit,
    wait_for,
)

PYTHON = Path(__file__).parents[2] / ".venv-consumers" / "peers" / "bin" / "python"
SCRIPT = Path(__file__).with_name("check_peers.py")
Outputs = dict[str, dict[str, Tensors]]
LLAMA_CPP = ("-lllama-common", "-lllama", "-lggml", "-lggml-base")


@pytest.fixture(scope="session")
def quantize_with_imatrix(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return llama.cpp's own tool, as far as importance matrices go: IMATRIX IN.gguf OUT.gguf FTYPE."""
    library, _ = run_in("llamacpp", "where_llamacpp.py")
    assert library is not None
    program = tmp_path_factory.mktemp("program") / "quantize"
    folder = f"{library['folder']}/lib"
    subprocess.run(
        ["g++", "-std=c++17", f"-I{library['folder']}/include", Path(__file__).with_name("quantize_with_imatrix.cpp"),
         "-o", program, f"-L{folder}", *LLAMA_CPP, f"-Wl,-rpath-link,{folder}"], check=True,
    )  # fmt: skip

    def run_it(*arguments: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"LD_LIBRARY_PATH": folder}
        command = [program, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run_it


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct as a safetensors folder in the cache."""
    return demo_model.prepare(print)


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Return Gemma 3 270M: a large vocabulary, a tied head, norms of queries and keys, and a BOS that it needs."""
    return real_models.gemma()


@pytest.fixture(scope="session")
def mixture() -> Path:
    """Return a small mixture of the kind of Qwen3-MoE that was trained for a minute or two, and has 128 experts."""
    return real_models.mixture()


@pytest.fixture(scope="session")
def weights() -> Tensors:
    return peers_inputs.weights()


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory, weights: Tensors) -> Outputs:
    """Return all outputs of the peers: case or function, input, part."""
    assert PYTHON.exists(), f"run `make consumers` first: {PYTHON} is missing"
    folder = tmp_path_factory.mktemp("peers")
    codes = peers_inputs.codes()
    floats = {name: FORMATS[name].decode(code) for name, code in codes.items() if name.startswith("fp")}
    tensors = {f"x/{name}": x_OI for name, x_OI in weights.items()}
    tensors |= {f"codes/{name}": code for name, code in codes.items()}
    tensors |= {f"levels/{name}": levels for name, levels in floats.items()}
    save_file(tensors, folder / "in.safetensors")
    process = subprocess.run(
        [PYTHON, SCRIPT, folder / "in.safetensors", folder / "out.safetensors"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    outputs: Outputs = defaultdict(lambda: defaultdict(dict))
    for key, value in load_file(folder / "out.safetensors").items():
        case, name, part = key.split("/")
        outputs[case][name][part] = value
    return outputs


@pytest.fixture
def each(peers: Outputs, weights: Tensors) -> Callable[[str], list[tuple[str, torch.Tensor, Tensors]]]:
    """Return a function from a case or a function's name to (name, weight, the peer's outputs) of every input."""
    return lambda case: [(name, x_OI, peers[case][name]) for name, x_OI in weights.items()]
