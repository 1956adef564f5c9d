"""One job on several processes (gloo): the same bytes as on one, whatever the number of ranks.

Most ranks here are forks of the test's process, which has loaded everything already; one test starts them as a user
does, with torchrun.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantcore import pipeline, presets
from quantcore.calibration.ranges import Watched, learned, ranges_of_all
from quantcore.checkpoint.artifact import sha256
from quantcore.cli import main
from quantcore.errors import NumericsError
from quantcore.layer import LayerPlan
from quantcore.observers import observer_for
from quantcore.runtime.ranks import joined
from tests.factories import MIXTURES, tiny_model

NUM_WINDOWS = 70  # four chunks of windows, which do not divide it
START_S = 240


def config(preset, *steps):
    return {**presets.resolve(preset).to_dict(), "algo_config": list(steps)}


def task_file(model_dir: Path, output_dir: Path, given, exports=("quark", "fake_quantized")) -> Path:
    file = output_dir.with_suffix(".json")
    task = {
        "model_dir": str(model_dir), "output_dir": str(output_dir), "config": given, "export": exports,
        "calibration": {"num_samples": NUM_WINDOWS, "seq_len": 32}, "evaluation": {"num_windows": 5, "seq_len": 32},
    }  # fmt: skip
    file.write_text(json.dumps(task))
    return file


def forked(work, size: int, folder: Path) -> list[int]:
    """The exit statuses of ``size`` ranks that call ``work(rank)``; what they print goes to files in ``folder``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def rank_main(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.exit(work(rank))

    ranks = [multiprocessing.get_context("fork").Process(target=rank_main, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(START_S)
    return [process.exitcode for process in ranks]


def events_of(folder: Path, rank: int = 0):
    return [json.loads(line) for line in (folder / f"out.{rank}").read_text().splitlines()]


def seen_of(folder: Path, output_dir: Path):
    """Digests of all weights, and what was said of them."""
    files = {path.relative_to(output_dir).as_posix(): sha256(path) for path in output_dir.rglob("*.safetensors")}
    events = events_of(folder)
    [summary] = [event["summary"] for event in events if event["kind"] == "completed"]
    told = sorted(json.dumps(event) for event in events if event["kind"] in ("layer_quantized", "warned"))
    report = json.loads((output_dir / "report.json").read_text())
    layers = [layer["name"] for layer in report["layers"]]
    return files, summary["perplexity_before"], summary["perplexity_after"], told, layers


MODELS = {"dense": {}, "mixture": {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}}
GPTQ = {"name": "gptq"}
CASES = {
    "rounded": ("dense", config("w4a16")),
    "static": ("dense", config("int8_static", {"name": "smoothquant"})),
    "gptq": ("dense", config("w4a16", {"name": "awq"}, GPTQ)),
    "compared": ("dense", config("mxfp4", {"name": "rotation"}, {"name": "gptaq"})),
    "experts": ("mixture", config("fp8", {**GPTQ, "true_sequential": True})),
}


@pytest.mark.usefixtures("proof_in_this_process")
@pytest.mark.parametrize("case", CASES)
def test_as_many_ranks_as_you_like_give_the_same_bytes(tmp_path, case):
    """Also where windows do not divide among ranks, and where a rank has none (there are four chunks of them)."""
    model, given = CASES[case]
    model_dir = tiny_model(tmp_path / "model", **MODELS[model])
    found = []
    for size in (1, 2, 5):
        output_dir = tmp_path / f"on_{size}"
        file = task_file(model_dir, output_dir, given)
        statuses = forked(lambda _, file=file: main(["run", str(file)]), size, tmp_path)
        assert statuses == [0] * size, (tmp_path / "err.0").read_text()
        assert all(events_of(tmp_path, rank) == [] for rank in range(1, size))
        found.append(seen_of(tmp_path, output_dir))
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 2 and len(found[0][4]) >= 21


@pytest.mark.usefixtures("proof_in_this_process")
def test_a_file_that_one_process_writes(tmp_path):
    """GGUF, beside a format that all write."""
    model_dir = tiny_model(tmp_path / "model")
    given = config("gguf_q4_0", GPTQ)
    for size in (1, 2):
        file = task_file(model_dir, tmp_path / f"on_{size}", given, ("gguf", "fake_quantized"))
        assert forked(lambda _, file=file: main(["run", str(file)]), size, tmp_path) == [0] * size
    one, two = ({path.name: sha256(path) for path in (tmp_path / f"on_{n}").rglob("model.*")} for n in (1, 2))
    assert one == two and set(one) == {"model.gguf", "model.safetensors"}


def test_a_rank_that_dies_ends_the_job(tmp_path, monkeypatch):
    """The others say so, as something that may pass, and leave nothing behind."""
    file = task_file(tiny_model(tmp_path / "model"), tmp_path / "out", config("w4a16", GPTQ))
    measured = pipeline.measured

    def work(rank):
        if rank == 1:
            monkeypatch.setattr(pipeline, "measured", lambda solved: os.kill(os.getpid(), signal.SIGKILL))
        return main(["run", str(file)])

    assert forked(work, 3, tmp_path) == [1, -signal.SIGKILL, 1]
    assert pipeline.measured is measured
    failure = events_of(tmp_path)[-1]
    assert (failure["kind"], failure["code"], failure["retryable"]) == ("failed", "rank_lost", True)
    assert events_of(tmp_path, 2) == []
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("poisoned", [0, 1])
def test_nan_on_any_rank_is_seen_on_all(tmp_path, poisoned):
    layer = LayerPlan("model.layers.0.mlp.up_proj", 0, (8, 4), presets.PRESETS["int8_static"].layer_config)

    def work(rank):
        observer = observer_for(layer.input_tensors)
        x = torch.ones(3, 4)
        x[1, 2] = torch.nan if rank == poisoned else 5.0
        observer.update(x)
        with joined() as ranks:
            [merged] = ranges_of_all({layer: Watched(observer, None)}, ranks).values()
            ranks.wait()
        try:
            learned(layer, merged, torch.float32)
        except NumericsError as error:
            return 7 if error.code == "nonfinite_activations" else 1
        return 0

    assert forked(work, 2, tmp_path) == [7, 7]


def test_torchrun_starts_ranks(tmp_path):
    """As a person does, and as a worker with BITFOUNDRY_ENGINE_RANKS."""
    model_dir = tiny_model(tmp_path / "model")
    flags = ["--model_dir", str(model_dir), "--output_dir", str(tmp_path / "out"), "--quant_scheme", "w4a16",
             "--num_calib_data", "4", "--seq_len", "32"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "quantcore",
         *flags], capture_output=True, text=True, timeout=START_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()
    assert done.stdout.count("perplexity") == 1, "one of them shows the report"
