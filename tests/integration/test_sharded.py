"""Blocks in shards on several ranks (FSDP2, gloo): the same bytes as whole blocks, and a rank reads only its shards."""

import json
import os
import re
import signal

import pytest
import torch
from safetensors import safe_open

import quantcore
from quantcore.checkpoint.headers import read_local
from quantcore.cli.main import main
from quantcore.engine.runtime import sharded
from quantcore.engine.runtime import weight_loader as single
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.ranks import ALONE, Ranks, computing_together, joined
from quantcore.engine.runtime.shards import is_sharded, local_rows
from quantcore.tensors import source
from tests.support.forks import config, events_of, forked, seen_of, task_file
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare

GPTQ = {"name": "gptq"}
MIXTURE = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}
MODELS = {
    "dense": {"attention_bias": True},
    "mixture": MIXTURE,
    "small mixture": {**MIXTURE, "num_hidden_layers": 2},
    "many experts": {**MIXTURE, "num_experts": 64, "num_local_experts": 64, "num_hidden_layers": 2},
}
CASES = {
    "scaled experts": ("mixture", config("w4a16", {"name": "rotation", "random_r1": True}, {"name": "awq"}, GPTQ)),
    "scaled": ("dense", config("int8_static", {"name": "autosmoothquant"})),
    "scaled twice": ("dense", config("int8_dynamic", {"name": "smoothquant"}, {"name": "awq"})),
    "rotated": ("dense", config("mxfp4", {"name": "rotation"})),
    "static experts": ("mixture", config("fp8", GPTQ)),
    "scaled static experts": ("mixture", config("int8_static", {"name": "awq"}, GPTQ)),
    "compared": ("dense", config("mxfp4", {"name": "gptaq"})),
    "rounded": ("dense", config("w4a16")),
    "static": ("dense", config("int8_static", {"name": "bias_correction"})),
    "in turn": ("dense", config("w4a16", {**GPTQ, "true_sequential": True})),
    "shared scale": ("dense", config("nvfp4")),
    "dynamic experts": ("mixture", config("int8_dynamic")),
    "borrowed tokens": ("many experts", config("w4a16", GPTQ)),
}


def read(folder, name):
    """A tensor of a model's files."""
    file = next(file for file in folder.rglob("*.safetensors") if name in set(safe_open(file, "pt").keys()))
    return safe_open(file, "pt").get_tensor(name)


def run(model_dir, output_dir, given, size, **more):
    file = task_file(model_dir, output_dir, given, **more)
    return forked(lambda _: main(["run", str(file)]), size, output_dir.parent)


@pytest.mark.slow
@pytest.mark.usefixtures("proof_in_this_process")
@pytest.mark.parametrize("case", CASES)
def test_slices_give_the_bytes_that_whole_blocks_give(tmp_path, case):
    """Also where rows do not divide among ranks, and where ranks have other numbers of windows, or none."""
    model, given = CASES[case]
    model_dir = tiny_model(tmp_path / "model", **MODELS[model])
    found = []
    for size in (1, 5):
        output_dir = tmp_path / f"on_{size}"
        statuses = run(model_dir, output_dir, given, size, shard_blocks=True if size > 1 else None)
        assert statuses == [0] * size, "".join((tmp_path / f"err.{rank}").read_text() for rank in range(size))
        found.append(seen_of(tmp_path, output_dir))
    assert found[0] == found[1]
    if case.startswith("scaled"):
        edges = json.loads((output_dir / "report.json").read_text())["edges"]
        assert len(edges[0]["found"]) >= 3 and 0 in edges[0]["blocks"]
        norm = "model.layers.0.input_layernorm.weight"
        assert not torch.equal(read(output_dir, norm), read(model_dir, norm)), "a scale has moved"


@pytest.mark.usefixtures("proof_in_this_process")
def test_a_rank_reads_and_holds_its_slices(tmp_path, monkeypatch):
    """Every byte of a linear layer is read by one rank of three; norms, embeddings and the head by all."""
    model_dir = tiny_model(tmp_path / "model", **MODELS["small mixture"])
    headers = read_local(model_dir)
    read, held = [], []

    def note_read(self, name, begin, count, bytes_of=source.Source._bytes):
        read.append((name, begin, count))
        return bytes_of(self, name, begin, count)

    def note_held(block, ranks, device, keeps, shard=sharded.shard):
        shard(block, ranks, device, keeps)
        held.append({name: tuple(local_rows(one).shape) for name, one in block.named_parameters() if is_sharded(one)})

    monkeypatch.setattr(source.Source, "_bytes", note_read)
    monkeypatch.setattr(single, "shard", note_held)
    file = task_file(model_dir, tmp_path / "out", config("w4a16"), ("quark",), shard_blocks=True)

    def work(rank):
        status = main(["run", str(file)])
        (tmp_path / f"seen.{rank}").write_text(json.dumps([read, held]))
        return status

    assert forked(work, 3, tmp_path) == [0, 0, 0], (tmp_path / "err.0").read_text()
    seen = [json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in range(3)]
    linear = re.compile(r"model\.layers\.\d+\..*(q|k|v|o|gate|up|down)_proj\.weight")
    shards = {}
    for reads, _ in seen[1:]:  # the first also reads what was written, for the proof
        for name, begin, count in reads:
            if linear.fullmatch(name):
                shards.setdefault(name, []).append((begin, begin + count))
    assert len(shards) == sum(1 for name in headers.tensors if linear.fullmatch(name)) > 20
    for name, [(begin, middle), (also_middle, end)] in shards.items():
        assert 0 < begin <= middle == also_middle <= end == headers.tensors[name].num_bytes, name
    wanted = headers.tensors["model.layers.0.self_attn.q_proj.weight"].shape
    rows = [blocks[0]["self_attn.q_proj.weight"][0] for _, blocks in seen]
    assert sum(rows) == wanted[0] and max(rows) == -(-wanted[0] // 3)


def test_nan_in_the_slice_of_one_rank_is_seen_by_all(tmp_path):
    model_dir = tiny_model(tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    header = read_local(model_dir).tensors[name]
    with (model_dir / header.file).open("r+b") as file:
        file.seek(header.begin + header.num_bytes - 4)
        file.write(b"\xff\xff\xff\xff")  # NaN in float32 and twice in bfloat16, in the last row
    assert run(model_dir, tmp_path / "out", config("w4a16"), 2, shard_blocks=True) == [1, 1]
    failure = events_of(tmp_path)[-1]
    assert (failure["kind"], failure["code"], failure["retryable"]) == ("failed", "nonfinite_weights", False)
    assert name.removesuffix(".weight") in failure["message"]


def test_a_rank_that_dies_in_a_layer_ends_the_job(tmp_path, monkeypatch):
    """The other waits for its shard: it says so, as something that may pass."""
    file = task_file(tiny_model(tmp_path / "model"), tmp_path / "out", config("w4a16", GPTQ), shard_blocks=True)

    def work(rank):
        if rank == 1:
            monkeypatch.setattr(Hidden, "run_idle", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return main(["run", str(file)])

    assert forked(work, 2, tmp_path) == [1, -signal.SIGKILL]
    failure = events_of(tmp_path)[-1]
    assert (failure["kind"], failure["code"], failure["retryable"]) == ("failed", "rank_lost", True)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    "size, steps, words",
    [
        (1, [], "has only one"),
        (2, [{"name": "autoround"}], "autoround needs whole blocks"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, size, steps, words):
    given = config("w4a16", *steps)
    assert run(tiny_model(tmp_path / "model"), tmp_path / "out", given, size, shard_blocks=True) == [1] * size
    failure = events_of(tmp_path)[-1]
    assert failure["code"] == "unsupported_config" and words in failure["message"]


@pytest.mark.usefixtures("proof_in_this_process")
def test_without_whole_blocks_yaqa_is_gptaq_and_says_so(tmp_path):
    model_dir = tiny_model(tmp_path / "model", **MODELS["small mixture"])
    found = {}
    for name in ("yaqa", "gptaq"):
        output_dir = tmp_path / name
        assert run(model_dir, output_dir, config("w4a16", {"name": name}), 2, shard_blocks=True) == [0, 0]
        found[name] = [file.read_bytes() for file in sorted(output_dir.rglob("*.safetensors"))]
        warned = [line for line in json.loads((output_dir / "report.json").read_text())["warnings"] if "yaqa" in line]
        assert [("gptaq takes the place" in line) for line in warned] == [True] * (name == "yaqa")
    assert found["yaqa"] == found["gptaq"] != []


@pytest.mark.parametrize("free, shared", [(10**9, False), (1000, True)])
def test_blocks_are_shared_where_memory_is_short(monkeypatch, free, shared):
    monkeypatch.setattr(sharded, "free_memory_bytes", lambda device: free)
    two = Pair()
    found = sharded.sharing_ranks(None, {"block": 2000}, two, torch.device("cpu"))
    assert (found is two) == shared
    assert sharded.sharing_ranks(None, {"block": 2000}, ALONE, torch.device("cpu")) is None


class Pair(Ranks):
    """Two ranks that are of one mind."""

    def __init__(self):
        super().__init__(0, 2)

    def gather(self, value):
        return [value, value]


@pytest.mark.usefixtures("proof_in_this_process")
@pytest.mark.parametrize(
    "model, given",
    with_rare(
        [("dense", None), ("dense", config("fp8")), ("small mixture", config("int8_static"))],
        [("dense", config("fp8"))],
    ),
)
def test_a_model_that_several_ranks_hold_computes_what_a_whole_one_does(tmp_path, monkeypatch, model, given):
    """Float and quantized; each rank runs it on tokens of its own, and holds and reads a third of the linear layers."""
    folder = tiny_model(tmp_path / "model", **MODELS[model])
    if given is not None:
        assert main(["run", str(task_file(folder, tmp_path / "out", given, ("quark",)))]) == 0
        folder = tmp_path / "out"
    whole_model, _ = quantcore.load(folder)
    windows = torch.randint(1, 500, (3, 1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = [whole_model(ids).logits for ids in windows]
    read = []
    bytes_of = source.Source._bytes
    monkeypatch.setattr(source.Source, "_bytes", lambda *args: (read.append(args[3]), bytes_of(*args))[1])

    def work(rank):
        with joined() as ranks, computing_together(), torch.no_grad():
            shared, _ = quantcore.load(folder, ranks)
            assert torch.equal(shared(windows[rank]).logits, wanted[rank])
            sharded = sum(local_rows(one).numel() for one in shared.parameters() if is_sharded(one))
            linear = sum(one.numel() for one in shared.parameters() if is_sharded(one))
            assert sharded <= linear / 3 * 1.1 and linear > 10_000
            if given is None:
                assert sum(read) == 2 * (sum(one.numel() for one in shared.parameters()) - linear + sharded)
        return 0

    assert forked(work, 3, tmp_path) == [0, 0, 0], (tmp_path / "err.0").read_text()
