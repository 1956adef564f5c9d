"""Vectors: the nearest of all, along any axis, with signs of which an even number is negative where it must be."""

import itertools

import pytest
import torch

from quantcore.formats import BUILT_IN
from quantcore.formats.vectors import num_inputs, snap_

NAMES = [name for name, fmt in BUILT_IN.items() if fmt.vectors is not None]


def some(name, count):
    fmt = BUILT_IN[name]
    return torch.randn(count, num_inputs(fmt), generator=torch.Generator().manual_seed(0)) * fmt.max / 3


def test_other_formats_round_each_value_by_itself():
    assert NAMES == ["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"]
    x = torch.randn(3, 5)
    assert snap_(BUILT_IN["int4"], x, 0) is x and num_inputs(BUILT_IN["int4"]) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("iq1")])
def test_no_other_vector_is_nearer(name):
    """With free signs the nearest of all; with an even number of them nearly: which sign changes is chosen first."""
    fmt, x = BUILT_IN[name], some(name, 40)
    snapped = snap_(fmt, x.clone(), -1)
    assert torch.equal(fmt.round(snapped), snapped) and torch.equal(snap_(fmt, snapped.clone(), -1), snapped)
    book = fmt.vectors.magnitudes(x.device)
    signs = torch.tensor([*itertools.product((1.0, -1.0), repeat=fmt.vectors.size)])
    every = (book[:, None] * signs).flatten(0, 1)
    if fmt.vectors.even_signs:
        assert ((snapped < 0).sum(1) % 2 == 0).all()
    error = (x - snapped).square().sum(1)
    best = torch.cdist(x.view(-1, fmt.vectors.size), every).square().amin(1).view(len(x), -1).sum(1)
    if fmt.vectors.even_signs:
        assert (error >= best - 1e-4).all() and error.mean() < 1.5 * best.mean()
    else:
        torch.testing.assert_close(error, best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["iq1_s", "iq1_m"])
def test_no_other_side_of_the_vectors_is_nearer(name):
    fmt, x = BUILT_IN[name], some(name, 40)
    snapped = snap_(fmt, x.clone(), -1)
    assert torch.equal(fmt.round(snapped), snapped) and torch.equal(snap_(fmt, snapped.clone(), -1), snapped)
    book = fmt.vectors.magnitudes(x.device)
    assert book.shape == (2048, 8) and set(book.unique().tolist()) == {-1.0, 0.0, 1.0}
    sides = [
        torch.cdist(x.view(-1, 8), book + side).square().amin(1).view(len(x), -1).sum(1) for side in (-0.125, 0.125)
    ]
    torch.testing.assert_close((x - snapped).square().sum(1), torch.minimum(*sides), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_axis_is_that_of_the_inputs(name):
    fmt, x = BUILT_IN[name], some(name, 6).view(3, -1)
    assert torch.equal(snap_(fmt, x.T.clone(), 0).T, snap_(fmt, x.clone(), -1))
    assert torch.equal(snap_(fmt, x.T.contiguous(), 0).T, snap_(fmt, x.clone(), -1))
