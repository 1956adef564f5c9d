"""The parts of the self-test: each agrees with its reference, and with itself on the same data."""

from itertools import groupby

import pytest
import torch

from quantcore.engine.selftest.parts import CPU, parts
from quantcore.engine.selftest.run import compare
from quantcore.formats import BUILT_IN
from quantcore.formats.floats import FloatFormat

GROUPS = {group: list(of_group) for group, of_group in groupby(parts(), lambda part: part.group)}
REFERENCES = [part for part in parts() if part.reference is not None]


def test_all_that_a_device_computes_is_there():
    names = ["rounding", "packing", "activations", "kernels", "rotation", "statistics", "range search"]
    names += ["gptq", "gptaq"]
    assert list(GROUPS) == names, "each group stands together"
    assert [part.name for part in GROUPS["rounding"]] == list(BUILT_IN)
    assert all(part.allowed.why.endswith(".") for part in parts())


@pytest.mark.parametrize("part", REFERENCES, ids=lambda part: f"{part.group} {part.name}")
def test_parts_agree_with_their_reference(part):
    difference = compare(part.compute(CPU), part.reference())
    assert part.allowed.covers(difference), difference
    assert difference.share is not None or difference.largest is not None


@pytest.mark.parametrize("part", [group[0] for group in GROUPS.values()], ids=lambda part: part.group)
def test_the_data_are_always_the_same(part):
    torch.manual_seed(1)
    first = part.compute(CPU)
    torch.manual_seed(2)
    difference = compare(first, part.compute(CPU))
    assert (difference.share or 0, difference.largest or 0) == (0, 0)


def test_a_reference_finds_another_rounding(monkeypatch):
    """The tests above can fail."""
    plain = FloatFormat.round
    monkeypatch.setattr(FloatFormat, "round", lambda self, x, *rest: plain(self, x.nextafter(x + 1), *rest))
    [fp4] = [part for part in GROUPS["rounding"] if part.name == "fp4"]
    assert not fp4.allowed.covers(compare(fp4.compute(CPU), fp4.reference())), "values in the middle of two go up"
