"""Waits and copies of a block are constants: none lies in a loop over columns, groups, rows, experts or tokens.

Each is bounded by a number for a block or a layer, and does not grow when all of these grow. What grows with the number
of windows is listed: a window is embedded once, and a router decides for each window.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from quantcore.solvers.measures import GroupMeasure
from tests.support.accelerator_jobs import counted, task
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_usual

LARGER = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Twice as many columns, groups, rows and heads."""
BY_WINDOW = ("runtime/streamed_model.py", "runtime/relay.py", "runtime/arguments.py")
"""Files whose waits and copies may grow with the number of windows: they embed them, and run the head."""
JOBS = [("w4a16", "gptq"), ("w4a16", "awq"), ("mxfp4", "rotation gptq"), ("fp8", "gptaq"), ("w4a16", "autoround")]


def stops(folder, preset, chain, *, num_windows=2, seq_len=32, **shape):
    """Waits and copies of a job on one block, by kind and line of our code."""
    name = f"{len(list(folder.iterdir()))}"
    model = tiny_model(folder / f"model{name}", dtype=torch.float32, **{"num_hidden_layers": 1, **shape})
    counts = counted(task(model, folder / f"out{name}", preset, chain, num_windows=num_windows, seq_len=seq_len))
    assert counts.launches.total() > 100, "it ran on the device"
    kinds = {"wait": counts.waits, "to device": counts.to_device.places, "to host": counts.to_host.places}
    return Counter({(kind, line): number for kind, lines in kinds.items() for line, number in lines.items()})


def growth(small, large):
    return {key: (small[key], large[key]) for key in large if large[key] > small[key]}


@pytest.mark.parametrize(("preset", "chain"), with_usual(JOBS, [("w4a16", "gptq")]))
def test_nothing_grows_with_columns_groups_rows_or_tokens(tmp_path, preset, chain):
    small = stops(tmp_path, preset, chain)
    assert growth(small, stops(tmp_path, preset, chain, seq_len=64, **LARGER)) == {}


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
    grown = growth(stops(tmp_path, preset, chain), stops(tmp_path, preset, chain, num_windows=4))
    assert {line.partition(":")[0] for _, line in grown} <= set(BY_WINDOW)


@pytest.mark.slow
def test_routing_waits_as_often_for_many_experts_as_for_few(tmp_path):
    shape = {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}
    few, many = (
        stops(tmp_path, "w4a16", "gptq", **{**shape, "num_experts": count, "num_local_experts": count})
        for count in (4, 8)
    )
    routing = ("model/experts.py", "calibration/lending.py")
    assert {key for key in growth(few, many) if key[1].startswith(routing)} == set()
