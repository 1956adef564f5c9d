"""What a self-test allows."""

import math

import pytest

from quantcore.engine.selftest.values import Allowed, Difference


@pytest.mark.parametrize(
    ("share", "largest", "is_covered"),
    [
        (0.1, 1e-3, True),
        (None, 1e-3, True),
        (0.1, None, True),
        (0.11, 0.0, False),
        (0.0, 2e-3, False),
        (0.0, math.nan, False),
    ],
)
def test_both_bounds_count(share, largest, is_covered):
    allowed = Allowed(share=0.1, largest=1e-3, why="A test.")
    assert allowed.covers(Difference(num_codes=10, share=share, largest=largest)) is is_covered
