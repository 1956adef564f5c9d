import math

import pytest

from bench.estimates import noise


def test_noise_is_that_between_seeds() -> None:
    """Not that between units or schemes, whose estimates differ by orders of magnitude."""
    once = {("q", "k"): {"w4a16": 0.1, "int8": 1e-4}, ("o",): {"w4a16": 3.0, "int8": 2e-3}}
    twice = {unit: {scheme: 2 * value for scheme, value in losses.items()} for unit, losses in once.items()}
    assert noise([once, once]) == 0
    assert noise([once, twice]) == pytest.approx(math.log(2) / math.sqrt(2))
