"""Number formats against torch's own casts and against arithmetic done by hand."""

import pytest
import torch

from quantcore.formats import FORMATS


def e4m3_grid():
    """Every finite value of OCP e4m3, from the definition: bias 7, 3 mantissa bits, S.1111.111 is NaN."""
    positive = []
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                positive.append((mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(sorted(positive), dtype=torch.float64)


def test_fp8_e4m3_takes_the_nearest_value_of_the_grid_ties_to_even():
    fmt, grid = FORMATS["fp8_e4m3"], e4m3_grid()
    assert (fmt.max, fmt.bits) == (grid[-1].item(), 8)
    middles = (grid[1:] + grid[:-1]) / 2
    x = torch.cat(
        [grid, middles, torch.rand(50_000, dtype=torch.float64) * 448, torch.rand(50_000, dtype=torch.float64) ** 20]
    )
    above = torch.searchsorted(grid, x).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    nearer_below = (x - grid[below]) < (grid[above] - x)
    tie = (x - grid[below]) == (grid[above] - x)
    take_below = nearer_below | (tie & (below % 2 == 0))  # an even index is an even mantissa
    expected = torch.where(take_below, grid[below], grid[above])
    for sign in (1, -1):
        assert torch.equal(fmt.decode(fmt.encode((sign * x).float(), "half_even")), (sign * expected).float())


def test_fp8_saturates_and_keeps_nan():
    fmt = FORMATS["fp8_e4m3"]
    codes = fmt.encode(torch.tensor([1e9, -1e9, float("inf"), float("nan")]), "half_even").float()
    assert codes[:3].tolist() == [448.0, -448.0, 448.0]
    assert torch.isnan(codes[3])


@pytest.mark.parametrize(("name", "low", "high"), [("int4", -8, 7), ("uint4", 0, 15), ("int8", -128, 127)])
def test_integer_limits(name, low, high):
    fmt = FORMATS[name]
    assert (fmt.min, fmt.max) == (low, high)
    assert fmt.encode(torch.tensor([-1e6, 1e6]), "half_even").tolist() == [low, high]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("half_even", [-2, -2, 0, 0, 2, 2]), ("round", [-3, -2, -1, 1, 2, 3]), ("floor", [-3, -2, -1, 0, 1, 2])],
)
def test_rounding_methods(method, expected):
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert FORMATS["int8"].encode(x, method).tolist() == expected
