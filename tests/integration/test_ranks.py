"""One job on several processes (gloo): the same bytes as on one, whatever the number of ranks.

Most ranks here are forks of the test's process, which has loaded everything already; one test starts them as a user
does, with torchrun.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict

import jsonschema
import pytest
import torch

from quantcore.checkpoint.artifact import sha256
from quantcore.cli.main import main
from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.blockwise.scheduler import Scheduler
from quantcore.engine.calibration.ranges import Watched, learned, ranges_of_all
from quantcore.engine.observers import observer_for
from quantcore.engine.pipeline import writer as writing
from quantcore.engine.runtime.ranks import joined
from quantcore.engine.solvers import rtn
from quantcore.errors import NumericsError
from quantcore.plan import workload
from tests.support.forks import START_S, config, events_of, forked, seen_of, task_file
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare
from tests.support.service import ROOT

MIXTURE = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}
MODELS = {
    "dense": {"num_hidden_layers": 2},
    "mixture": MIXTURE,
    "many experts": {**MIXTURE, "num_experts": 64, "num_local_experts": 64, "num_hidden_layers": 2},
}
GPTQ = {"name": "gptq"}
CASES = {
    "rounded": ("dense", config("w4a16")),
    "static": ("dense", config("int8_static", {"name": "smoothquant"})),
    "gptq": ("dense", config("w4a16", {"name": "awq"}, GPTQ)),
    "compared": ("dense", config("mxfp4", {"name": "rotation"}, {"name": "gptaq"})),
    "gradients": ("mixture", config("w4a16", {"name": "awq"}, {"name": "yaqa"})),
    "tuned": ("mixture", config("w4a16", {"name": "autoround", "iters": 6, "batch_size": 5, "lr": 0.02})),
    "experts": ("mixture", config("fp8", {**GPTQ, "true_sequential": True})),
    "borrowed tokens": ("many experts", config("w4a16", GPTQ)),
}


@pytest.mark.usefixtures("proof_in_this_process")
@pytest.mark.parametrize(
    ("case", "sizes"),
    [("compared", (1, 5)), *(pytest.param(case, (1, 2, 5), marks=pytest.mark.slow) for case in CASES)],
)
def test_as_many_ranks_as_you_like_give_the_same_bytes(tmp_path, case, sizes):
    """Also where windows do not divide among ranks, and where a rank has none (there are four chunks of them)."""
    model, given = CASES[case]
    model_dir = tiny_model(tmp_path / "model", **MODELS[model])
    found = []
    for size in sizes:
        output_dir = tmp_path / f"on_{size}"
        file = task_file(model_dir, output_dir, given)
        statuses = forked(lambda _, file=file: main(["run", str(file)]), size, tmp_path)
        assert statuses == [0] * size, (tmp_path / "err.0").read_text()
        assert all(events_of(tmp_path, rank) == [] for rank in range(1, size))
        found.append(seen_of(tmp_path, output_dir))
    assert all(one == found[0] for one in found)
    assert len(found[0][0]) == 2 and len(found[0][4]) >= 14
    num_ranks = sizes[1]
    reports = {size: json.loads((tmp_path / f"on_{size}" / "report.json").read_text()) for size in (1, num_ranks)}
    jsonschema.validate(reports[num_ranks], json.loads((ROOT / "docs/report.schema.json").read_text()))
    alone, together = (reports[size]["summary"] for size in (1, num_ranks))
    assert "ranks" not in alone and [row["rank"] for row in together["ranks"]] == [*range(num_ranks)]
    borrow = [line for line in reports[1]["warnings"] if "chosen for tokens of the other experts" in line]
    assert bool(borrow) == (case == "borrowed tokens")
    in_vain = [line for line in reports[1]["warnings"] if "gained nothing" in line]
    assert len(in_vain) < len(reports[1]["layers"]) // 7 or case != "tuned"
    planned = alone["planned_peak_memory_bytes"]
    assert all(row["planned_peak_memory_bytes"] <= planned < 10 * row["peak_memory_bytes"] for row in together["ranks"])
    assert "process 1" in (tmp_path / f"on_{num_ranks}" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("proof_in_this_process")
@pytest.mark.parametrize(
    "case", with_rare(["gptq", "compared", "static groups", "in order"], ["gptq", "static groups", "in order"])
)
def test_ranks_solve_rows_of_one_layer(tmp_path, monkeypatch, case):
    """What takes longer than all else is done by all; a piece of rows here has 48, in a large model 4096."""
    given = {
        "static groups": config("nvfp4", {**GPTQ, "static_groups": True}),
        "in order": config("w4a16", {**GPTQ, "true_sequential": True}),
    }.get(case) or CASES[case][1]
    monkeypatch.setattr(workload, "SOLVED_ROWS", 48)
    monkeypatch.setattr(rtn, "NUM_OUTPUTS", 16)
    solve = Scheduler._solve_group

    def noted(self, group, weights, global_scales):
        with (tmp_path / "solved").open("a") as file:
            for layer, weight in weights.items():
                file.write(f"{len(weight)} {layer.out_features} {layer.name} {os.environ['RANK']}\n")
        return solve(self, group, weights, global_scales)

    monkeypatch.setattr(Scheduler, "_solve_group", noted)
    model_dir = tiny_model(tmp_path / "model")
    found = []
    for size in (1, 2, 5):
        (tmp_path / "solved").write_text("")
        file = task_file(model_dir, tmp_path / f"on_{size}", given)
        statuses = forked(lambda _, file=file: main(["run", str(file)]), size, tmp_path)
        assert statuses == [0] * size, (tmp_path / "err.0").read_text()
        found.append(seen_of(tmp_path, tmp_path / f"on_{size}"))
        solved = [line.split() for line in (tmp_path / "solved").read_text().splitlines()]
        rows, ranks = Counter(), defaultdict(set)
        for num_rows, _, name, rank in solved:
            rows[name] += int(num_rows)
            ranks[name].add(rank)
        assert all(rows[name] == int(num_outputs) for _, num_outputs, name, _ in solved)  # each once
        assert max(map(len, ranks.values())) == min(size, 3)  # 128 rows read what is widest
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
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

    def work(rank):
        if rank == 1:
            monkeypatch.setattr(writing, "measured", lambda solved: os.kill(os.getpid(), signal.SIGKILL))
        return main(["run", str(file)])

    assert forked(work, 3, tmp_path) == [1, -signal.SIGKILL, 1]
    failure = events_of(tmp_path)[-1]
    assert (failure["kind"], failure["code"], failure["retryable"]) == ("failed", "rank_lost", True)
    assert (failure["rank"], failure["block"]) == (0, 0)
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


@pytest.mark.slow
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
    assert (tmp_path / "out" / "MANIFEST.json").exists()
    assert done.stdout.count("perplexity") == 1, "one of them shows the report"
