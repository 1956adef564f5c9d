"""What a layer's event says of its weight and its inputs: a histogram and the channels that stand out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantcore.engine.blockwise import reported_errors
from quantcore.engine.blockwise.reported_errors import NUM_BINS, NUM_SAMPLED
from quantcore.engine.calibration.stats import Stats


def described(weight_OI: torch.Tensor, largest_I: torch.Tensor | None = None) -> dict[str, Any]:
    stats = None
    if largest_I is not None:
        stats = Stats(num_tokens=8, largest_I=largest_I, mean_I=largest_I, mean_abs_I=largest_I)
    looks = reported_errors._looks(SimpleNamespace(stats=stats), weight_OI)  # type: ignore[arg-type]
    return reported_errors._described(torch.cat(looks).tolist())


def test_each_weight_is_counted_in_its_part_of_the_range() -> None:
    weight_OI = torch.linspace(-2, 2, 4096).view(64, 64)
    spread = described(weight_OI)["weight_spread"]
    expected = torch.histc(weight_OI, NUM_BINS, min=-2, max=2).int().tolist()
    assert spread["largest"] == 2 and sum(spread["counts"]) == 4096
    assert spread["counts"] == pytest.approx(expected, abs=1)  # a weight on an edge may lie on either side
    assert "input_range" not in described(weight_OI)
    assert described(torch.zeros(4, 4))["weight_spread"]["counts"][NUM_BINS // 2] == 16


def test_of_many_weights_some_are_counted() -> None:
    spread = described(torch.ones(3, NUM_SAMPLED))["weight_spread"]
    assert NUM_SAMPLED / 2 < sum(spread["counts"]) <= NUM_SAMPLED


def test_channels_that_stand_out_are_named_largest_first() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(64, 32, generator=generator)
    weight_OI[:, 7] *= 5
    weight_OI[:, 30] *= 9
    largest_I = torch.full((32,), 0.5)
    largest_I[3] = 40.0
    found = described(weight_OI, largest_I)
    assert [each["channel"] for each in found["weight_spread"]["outliers"]] == [30, 7]
    assert found["weight_spread"]["outliers"][0]["ratio"] == pytest.approx(9, rel=0.3)
    assert found["input_range"] == {"largest": 40.0, "median": 0.5, "outliers": [{"channel": 3, "ratio": 80.0}]}
    few = described(weight_OI[:, :2], largest_I[:2])
    assert few["input_range"]["outliers"] == []
