"""Waits and copies of a block are constants: none lies in a loop over columns, groups, rows, experts or tokens.

They do not grow when all of these grow, and a job's second block has at most ``MOST`` of them. What grows with the
number of windows is listed: a window is embedded once, and a router decides for each window.

Counted on 2026-11-26 for one more block of the tiny models, 64 wide, before and after the loops were mended:

    w4a16 gptq           waits 132 -> 74   copies to the device  99 -> 45
    w4a16 awq            waits 293 -> 96   copies to the device 211 -> 113
    w4a16 gptq, mixture  waits 331 -> 169  copies to the device 155 -> 43
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from quantcore.solvers.measures import GroupMeasure
from tests.support.accelerator_jobs import counted, task
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_usual

LARGER = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Twice as many columns, groups, rows and heads."""
BY_WINDOW = ("runtime/streamed_model.py", "runtime/relay.py", "runtime/arguments.py")
"""Files whose waits and copies may grow with the number of windows: they embed them, and run the head."""
BY_DIGITS = ("edges/tracing.py", "rotation/hadamard.py")
"""Files whose waits and copies may grow with the number of digits of a width: they find edges, and factor an order."""
MOST = {"wait": 74, "to device": 45, "to host": 28}
"""Of one more block of the dense model, in w4a16 with GPTQ: 7 layers with 4 inputs."""
JOBS = [("w4a16", "gptq"), ("w4a16", "awq"), ("mxfp4", "rotation gptq"), ("fp8", "gptaq"), ("w4a16", "autoround")]


def stops(folder, preset, chain, *, num_windows=2, seq_len=32, **shape):
    """Waits and copies of a job on one block, by kind and line of our code."""
    name = f"{len(list(folder.iterdir()))}"
    model = tiny_model(folder / f"model{name}", dtype=torch.float32, **{"num_hidden_layers": 1, **shape})
    counts = counted(task(model, folder / f"out{name}", preset, chain, num_windows=num_windows, seq_len=seq_len))
    assert counts.launches.total() > 100, "it ran on the device"
    kinds = {"wait": counts.waits, "to device": counts.to_device.places, "to host": counts.to_host.places}
    return Counter({(kind, line): number for kind, lines in kinds.items() for line, number in lines.items()})


def growth(small, large, *, but=()):
    """What ``large`` has more of, outside the files ``but``."""
    return {key: (small[key], large[key]) for key in large if large[key] > small[key] and not key[1].startswith(but)}


@pytest.mark.parametrize(("preset", "chain"), with_usual(JOBS, [("w4a16", "gptq")]))
def test_nothing_grows_with_columns_groups_rows_or_tokens(tmp_path, preset, chain):
    small = stops(tmp_path, preset, chain)
    assert growth(small, stops(tmp_path, preset, chain, seq_len=64, **LARGER), but=BY_DIGITS) == {}


@pytest.mark.slow
def test_a_wait_in_a_loop_over_groups_is_seen(tmp_path, monkeypatch):
    """The test above can fail."""
    errors = GroupMeasure.errors

    def waiting(self, params_CP):
        found = errors(self, params_CP)
        found.sum().item()
        return found

    monkeypatch.setattr(GroupMeasure, "errors", waiting)
    small, large = stops(tmp_path, "w4a16", "rounded"), stops(tmp_path, "w4a16", "gptq")
    assert not [line for _, line in small if "test_budgets" in line], "plain rounding searches no ranges"
    assert any("test_budgets" in line for _, line in growth(small, large))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "chain"), JOBS)
def test_only_embedding_grows_with_the_number_of_windows(tmp_path, preset, chain):
    few, many = stops(tmp_path, preset, chain), stops(tmp_path, preset, chain, num_windows=4)
    assert growth(few, many, but=BY_WINDOW) == {}


@pytest.mark.slow
def test_a_block_keeps_to_its_budget(tmp_path):
    one, two = (stops(tmp_path, "w4a16", "gptq", num_hidden_layers=count) for count in (1, 2))
    more = {kind: sum(number for (own, _), number in (two - one).items() if own == kind) for kind in MOST}
    assert all(more[kind] <= most for kind, most in MOST.items()), more


@pytest.mark.slow
def test_routing_waits_as_often_for_many_experts_as_for_few(tmp_path):
    shape = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}
    few, many = (
        stops(tmp_path, "w4a16", "gptq", **{**shape, "num_experts": count, "num_local_experts": count})
        for count in (4, 8)
    )
    routing = ("model/experts.py", "calibration/lending.py")
    assert {key for key in growth(few, many) if key[1].startswith(routing)} == set()


def test_the_weights_of_the_next_block_wait_in_pinned_memory(tmp_path):
    model = tiny_model(tmp_path / "model", dtype=torch.bfloat16, num_hidden_layers=2)
    copied = counted(task(model, tmp_path / "out", "w4a16", "gptq")).to_device
    weights = load_file(model / "model.safetensors")
    of_second_block = sum(weight.nbytes for name, weight in weights.items() if name.startswith("model.layers.1."))
    assert copied.pinned_bytes == of_second_block
