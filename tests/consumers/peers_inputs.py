"""Tensors that show where two quantizers differ: random ones and deliberately hard ones."""

from __future__ import annotations

import math

import torch

from quantcore.formats import FORMATS

ROWS, COLUMNS = 16, 256
TIES_OF = ("int2", "int3", "int4", "int8", "uint4", "fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2")
LIMITS = {"int2": 1.5, "int3": 3.5, "int4": 7.5, "int8": 127.5, "uint4": 7.5}
"""The largest magnitudes for which the usual rules for integers give a scale of exactly 1."""


def weights() -> dict[str, torch.Tensor]:
    """Return the weights, each float32 [16, 256], without NaN and infinity."""
    generator = torch.Generator().manual_seed(20261121)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    signs = torch.randn(ROWS, COLUMNS, generator=generator).sign()
    exponents = torch.randint(-20, 20, (ROWS, 1), generator=generator)
    outliers = normal.clone()
    outliers[::3, ::50] = 1e4 * signs[::3, ::50]
    zeros = normal.clone()
    zeros[::2] = 0
    zeros[1, : COLUMNS // 2] = 0
    lonely = torch.zeros(ROWS, COLUMNS)
    lonely[:, ::64] = normal[:, ::64]
    return {
        "normal": normal,
        "rows_of_all_sizes": torch.ldexp(normal, exponents),
        "heavy_tailed": normal**5,
        "outliers": outliers,
        "zeros": zeros,
        "all_zero": torch.zeros(ROWS, COLUMNS),
        "negative": -normal.abs() - 0.1,
        "positive": normal.abs() + 0.1,
        "lonely": lonely,
        "one_negative": torch.where(torch.arange(COLUMNS) == 7, -3.0, 0.0).repeat(ROWS, 1),
        "constant": torch.full((ROWS, COLUMNS), 0.3),
        "small": normal * 1e-6,
        "denormal": normal * 1e-40,
        "huge": normal * 1e30,
        "near_powers": _near_powers(signs),
        "extreme_exponents": _extreme_exponents(normal),
        **{f"ties_{name}": _ties(name, exponents, generator) for name in TIES_OF},
    }


def _near_powers(signs: torch.Tensor) -> torch.Tensor:
    """Return blocks of 16 whose largest value lies beside a threshold of an e8m0 rule."""
    places = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.9921875, 2.0])
    edges = torch.cat([places, places.nextafter(torch.tensor(0.0)), places.nextafter(torch.tensor(math.inf))])
    num_blocks = ROWS * COLUMNS // 16
    largest = edges[torch.arange(num_blocks) % len(edges)] * torch.exp2((torch.arange(num_blocks) % 11 - 5).float())
    ramp = torch.linspace(0.05, 0.9, 16)
    ramp[5] = 1
    return (largest.unsqueeze(1) * ramp).reshape(ROWS, COLUMNS) * signs


def _extreme_exponents(normal: torch.Tensor) -> torch.Tensor:
    """Return rows near both ends of float32, whose e8m0 exponents leave the byte's range."""
    exponents = torch.tensor([*range(-140, -124), *range(118, 127)])[-ROWS:].unsqueeze(1)
    rows = torch.ldexp(normal.clamp(-1.9, 1.9), exponents)
    rows[:4] = torch.ldexp(normal[:4], torch.tensor([[-146], [-135], [-128], [-126]]))
    return rows


def _ties(name: str, exponents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values half-way between two neighbours of a grid, in rows whose scale is a power of two."""
    fmt = FORMATS[name]
    grid = torch.tensor(fmt.grid()) - (LIMITS[name] + 0.5 if name.startswith("u") else 0)
    middles = (grid[1:] + grid[:-1]) / 2
    chosen = middles[torch.randint(len(middles), (ROWS, COLUMNS), generator=generator)]
    limit = LIMITS.get(name, fmt.max)
    chosen[:, ::16], chosen[:, 1::16] = limit, -limit
    return torch.ldexp(chosen, exponents // 2)


def codes() -> dict[str, torch.Tensor]:
    """Return integer codes to be packed, [24, 64], with all values of each format."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name in ("int2", "int3", "int4", "int8", "uint2", "uint4"):
        fmt = FORMATS[name]
        drawn = torch.randint(int(fmt.min), int(fmt.max) + 1, (24, 64), generator=generator)
        tensors[name] = drawn.to(torch.int8 if fmt.signed else torch.uint8)
    for name in ("fp4", "fp6_e2m3", "fp6_e3m2"):
        tensors[name] = torch.randint(0, 1 << FORMATS[name].bits, (24, 64), generator=generator).to(torch.uint8)
    return tensors
