"""Hadamard matrices: exact in integers, of the orders that the literature reaches; fast products equal dense ones."""

import pytest
import torch

from quantcore.engine.transforms.rotation import hadamard as module
from quantcore.engine.transforms.rotation.hadamard import Rotation, factors, hadamard, largest_order, orthogonal
from quantcore.errors import ConfigError

# Orders below 1000 without a matrix by Sylvester or Paley, prime powers included (Paley 1933; OEIS A046116).
NOT_PALEY = [
    92, 116, 156, 172, 184, 188, 232, 236, 260, 268, 292, 324, 356, 372, 376, 404, 412, 428, 436, 452, 472, 476, 508,
    520, 532, 536, 584, 596, 604, 612, 652, 668, 712, 716, 732, 756, 764, 772, 808, 836, 852, 856, 872, 876, 892, 904,
    932, 940, 944, 952, 956, 964, 980, 988, 996,
]  # fmt: skip


def product_with_itself(matrix):
    """H H^T. Sums of at most 2^53 ones are exact in float64."""
    wide = matrix.double()
    return wide @ wide.T


def test_every_order_that_the_constructions_reach_below_1000():
    assert [order for order in range(4, 1000, 4) if factors(order) is None] == NOT_PALEY
    assert [order for order in range(1, 1000) if order % 4 and factors(order) is not None] == [1, 2]


@pytest.mark.parametrize(
    "order",
    # 28 52 344 (3^3, 5^2, 7^3), 82 = 81 + 1 of Paley II (3^4): powers of primes; 244 = 3^5 + 1; 2188 = 3^7 + 1
    [1, 2, 4, 8, 12, 20, 28, 36, 44, 52, 60, 100, 108, 140, 164, 244, 344, 576, 1024, 1536, 2188],
)
def test_a_matrix_is_exactly_hadamard(order):
    matrix = hadamard(order)
    assert matrix.shape == (order, order) and matrix.dtype == torch.int8
    assert (matrix.abs() == 1).all()
    assert torch.equal(product_with_itself(matrix), order * torch.eye(order, dtype=torch.float64))


def test_every_matrix_below_250_is_exactly_hadamard():
    for order in range(4, 250, 4):
        if order not in NOT_PALEY:
            matrix = hadamard(order)
            assert (matrix.abs() == 1).all()
            assert torch.equal(product_with_itself(matrix), order * torch.eye(order, dtype=torch.float64)), order


@pytest.mark.parametrize("size", [11008, 14336, 18944, 27648, 28672, 5120, 13824, 29568, 14848, 8960, 10944, 2880])
def test_sizes_of_real_models_are_one_matrix(size):
    assert largest_order(size) == size


def test_what_no_construction_reaches_becomes_blocks():
    assert largest_order(13696) == 128  # 107 * 128, and no construction for 107 * 4 ... 107 * 128
    assert largest_order(276) == 276  # 3 * 92, but 2 * (137 + 1) by itself
    rotation = orthogonal(92, seed=3)
    assert (rotation.order, rotation.num_blocks, rotation.size) == (4, 23, 92)
    dense = rotation.dense()
    assert (dense[:4, 4:] == 0).all() and (dense[4:8, 4:8] != 0).all()


@pytest.mark.parametrize("order", [92, 107, 3, 0])
def test_an_order_that_is_not_known_is_refused(order):
    with pytest.raises(ConfigError) as caught:
        hadamard(order)
    assert caught.value.code == "no_hadamard_matrix"


def test_a_factor_too_large_to_multiply_with_is_not_taken():
    assert factors(5420) == (5420,)
    assert largest_order(5420) == 1084
    with pytest.raises(ConfigError, match="5420"):
        orthogonal(5420, block_size=5420)


@pytest.mark.parametrize("size", [1, 2, 12, 64, 92, 128, 344, 576, 2880, 4096])
@pytest.mark.parametrize("random_signs", [False, True])
def test_the_fast_product_is_the_dense_one(size, random_signs):
    """The dense matrix here is made without the class's own product."""
    rotation = orthogonal(size, seed=1, random_signs=random_signs)
    order = largest_order(size)
    dense = torch.block_diag(*[hadamard(order).double()] * (size // order)) / order**0.5
    if random_signs:
        dense = rotation.signs_N.double()[:, None] * dense
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(rotation.apply(x), x @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.inverse(x), x @ dense.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.apply(x.float()), (x @ dense).float(), rtol=0, atol=4e-6)
    half = x.bfloat16()
    assert torch.equal(rotation.apply(half), rotation.apply(half.float()).bfloat16())


@pytest.mark.parametrize("size", [92, 576, 1408])
def test_rotations_are_orthogonal_and_undone_by_their_inverse(size):
    rotation = orthogonal(size, seed=5)
    dense = rotation.apply(torch.eye(size)).double()  # what float32 holds, multiplied exactly
    torch.testing.assert_close(dense @ dense.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-6)
    x = torch.randn(7, size)
    torch.testing.assert_close(rotation.inverse(rotation.apply(x)), x, rtol=0, atol=3e-6)
    torch.testing.assert_close(rotation.apply(rotation.inverse(x)), x, rtol=0, atol=3e-6)


def test_the_inverse_is_no_second_product_when_h_is_not_symmetric():
    rotation = orthogonal(12, random_signs=False)
    x = torch.randn(4, 12)
    assert (rotation.apply(x) - rotation.inverse(x)).abs().max() > 0.1


def test_signs_follow_the_seed():
    first, again, other = (orthogonal(256, seed=seed).signs_N for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.tolist()) == {-1, 1}
    assert orthogonal(256, seed=7, random_signs=False).signs_N is None


def test_the_size_of_blocks_may_be_given():
    assert orthogonal(576, block_size=64) != orthogonal(576, block_size=64)  # values by identity: they hold tensors
    rotation = orthogonal(576, block_size=64)
    assert (rotation.order, rotation.num_blocks) == (64, 9)
    for bad, code in ((128, "rotation_size_does_not_fit"), (6, "no_hadamard_matrix")):
        with pytest.raises(ConfigError) as caught:
            orthogonal(576, block_size=bad)
        assert caught.value.code == code
        assert caught.value.field == "/algo_config/rotation_size"


def test_a_matrix_first_used_without_gradients_serves_with_them():
    module._factor.cache_clear()
    with torch.inference_mode():
        Rotation(12).apply(torch.ones(12))
    x = torch.ones(12, requires_grad=True)
    Rotation(12).apply(x).sum().backward()
    assert x.grad is not None


def test_a_matrix_first_used_in_a_trace_serves_with_numbers():
    class Turning(torch.nn.Module):
        def forward(self, x):
            return Rotation(12).apply(x)

    module._factor.cache_clear()
    x = torch.randn(12)
    traced = torch.export.export(Turning(), (torch.zeros(12),)).module()(x)
    torch.testing.assert_close(traced, Rotation(12).apply(x))
    torch.testing.assert_close(traced, x @ Rotation(12).dense().float())


def test_no_square_matrix_is_made_for_a_large_size():
    rotation = orthogonal(28672)
    assert max(module._quick_factors(28672)) == 32
    x = torch.randn(2, 28672)
    torch.testing.assert_close(rotation.apply(x).norm(dim=-1), x.norm(dim=-1))
