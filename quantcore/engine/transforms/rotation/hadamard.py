"""Hadamard matrices of many orders, and orthogonal matrices made from them that multiply fast.

A Hadamard matrix H has entries 1 and -1 and H H^T = n I. Divided by sqrt(n) it spreads an outlier in one channel evenly
over all of them, which is the purpose of rotations before quantization (QuaRot, Ashkboos et al. 2024). Paley (On
orthogonal matrices, 1933) makes them from the squares of a finite field GF(q), q a power of a prime: of order q + 1
where q = 3 mod 4, of order 2 (q + 1) where q = 1 mod 4. Kronecker products of these with each other and with [[1, 1],
[1, -1]] (Sylvester) have the products of the orders. So 12, 20, 28, 36, 44, 52, 60 ... times powers of two exist here.
Of the multiples of 4 below 1000, 55 are missing, the first are 92, 116, 156, 172, 184 and 188.

x H is computed one Kronecker factor after the other: n (f1 + f2 + ...) steps a row instead of n^2, and no n x n matrix.

Legend: N size of the rotation, Q order of a field.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import isqrt, sqrt

import torch
from torch.utils._python_dispatch import _disable_current_modes

from quantcore.errors import ConfigError

MAX_FACTOR = 4096  # largest dense factor to multiply x with: 64 MiB in float32
RADIX = 6  # a power of two is cut into factors up to 2^6: ten times faster on a CPU than butterflies of two


@cache
def factors(order: int) -> tuple[int, ...] | None:
    """Return orders of Hadamard matrices whose Kronecker product has this ``order``; None if no construction exists.

    The last may be any power of two, the others are Paley's. Of several products the cheapest to multiply with is
    returned.
    """
    if order < 1:
        return None
    if order & (order - 1) == 0:
        return (order,) if order > 1 else ()
    ways = []
    for first in _divisors(order):
        rest = factors(order // first) if first & (first - 1) and _paley_field(first) else None
        if rest is not None:
            ways.append((first, *rest))
    return min(ways, key=_cost, default=None)


def hadamard(order: int) -> torch.Tensor:
    """Make a Hadamard matrix [order, order], int8: entries 1 and -1, H H^T = order I. Raises ConfigError."""
    orders = factors(order)
    if orders is None:
        raise _unreachable(order)
    return _kronecker(orders)


def largest_order(size: int) -> int:
    """Return the largest divisor of ``size`` that is the order of a Hadamard matrix made here."""
    return max(order for order in _divisors(size) if _is_fast(order))


@dataclass(frozen=True, eq=False)
class Rotation:
    """The orthogonal matrix R = diag(signs) diag(H, ..., H) / sqrt(order), [N, N], held as its parts.

    ``signs_N`` is int8 on the CPU, None for no change of signs.
    """

    order: int
    num_blocks: int = 1
    signs_N: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return self.order * self.num_blocks

    def repeated(self, count: int) -> Rotation:
        """Return this rotation ``count`` times on the diagonal, for heads side by side."""
        signs = None if self.signs_N is None else self.signs_N.repeat(count)
        return Rotation(self.order, self.num_blocks * count, signs)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x R for x [..., N], in x's dtype; computed in float32, or in float64 if x is."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self._multiply(self._scaled(wide), transposed=False).to(x.dtype)

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Return x R^T, which undoes ``apply``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self._scaled(self._multiply(wide, transposed=True)).to(x.dtype)

    def dense(self) -> torch.Tensor:
        """Return R itself, float64 [N, N], for tests and for small sizes."""
        return self.apply(torch.eye(self.size, dtype=torch.float64))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times the signs, divided by the length of H's rows."""
        scale = 1 / sqrt(self.order)
        return x * scale if self.signs_N is None else x * (_signs(self, x.dtype, x.device) * scale)

    def _multiply(self, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """Return x times H, or times its transpose, along the last axis."""
        result, after = x, self.order
        for piece in _quick_factors(self.order) or ():
            after //= piece
            matrix = _factor(piece, x.dtype, x.device)
            if after == 1:
                result = result.reshape(-1, piece) @ (matrix.T if transposed else matrix)
            else:
                result = (matrix if transposed else matrix.T) @ result.reshape(-1, piece, after)
        return result.reshape(x.shape)


def orthogonal(size: int, *, seed: int = 0, random_signs: bool = True, block_size: int | None = None) -> Rotation:
    """Return a rotation of ``size`` channels: one Hadamard matrix, or equal ones of ``block_size`` on the diagonal.

    Without a ``block_size`` it uses the largest order possible, often ``size`` itself. ``random_signs`` come from
    ``seed``: without them a channel of H sums up the input's mean. Raises ConfigError for a ``block_size`` that does
    not fit.
    """
    order = largest_order(size) if block_size is None else block_size
    if not _is_fast(order):
        raise _unreachable(order)
    if size % order:
        raise ConfigError(
            f"A rotation of size {order} does not divide {size} channels.",
            code="rotation_size_does_not_fit",
            hint=f"Remove it, or use a divisor such as {largest_order(size)}.",
            field="/algo_config/rotation_size",
        )
    signs = None
    if random_signs:
        signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)).to(torch.int8) * 2 - 1
    return Rotation(order, size // order, signs)


def _unreachable(order: int) -> ConfigError:
    below = next((other for other in range(order - 1, 0, -1) if _is_fast(other)), 1)
    return ConfigError(
        f"No known construction yields a Hadamard matrix of order {order}.",
        code="no_hadamard_matrix",
        hint=f"The next smaller order is {below}. Powers of two always work.",
        field="/algo_config/rotation_size",
    )


def _cost(orders: tuple[int, ...]) -> int:
    """Return the steps for each value: a dense factor needs its order, a power of two needs two steps a doubling."""
    return sum(2 * (order.bit_length() - 1) if order & (order - 1) == 0 else order for order in orders)


@cache
def _quick_factors(order: int) -> tuple[int, ...] | None:
    """Return ``factors``, with the power of two divided into factors that multiply fast."""
    orders = factors(order)
    if not orders or orders[-1] & (orders[-1] - 1):
        return orders
    exponent = orders[-1].bit_length() - 1
    count = -(-exponent // RADIX)
    return (*orders[:-1], *(2 ** ((exponent + index) // count) for index in range(count)))


def _is_fast(order: int) -> bool:
    pieces = _quick_factors(order)
    return pieces is not None and all(piece <= MAX_FACTOR for piece in pieces)


@lru_cache(maxsize=64)
def _signs(rotation: Rotation, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    assert rotation.signs_N is not None
    with torch.inference_mode(False), _disable_current_modes():  # as below
        return rotation.signs_N.to(device, dtype)


@lru_cache(maxsize=64)
def _factor(order: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The first caller may be in inference mode or in a trace, while a later one needs gradients and numbers.
    with torch.inference_mode(False), _disable_current_modes():
        return _kronecker((order,)).to(device, dtype)


def _kronecker(orders: tuple[int, ...]) -> torch.Tensor:
    result = torch.ones(1, 1, dtype=torch.int8)
    for order in orders:
        result = torch.kron(result, _paley(order) if order & (order - 1) else _sylvester(order))
    return result


def _sylvester(order: int) -> torch.Tensor:
    result = torch.ones(1, 1, dtype=torch.int8)
    while len(result) < order:
        result = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.int8), result)
    return result


def _paley(order: int) -> torch.Tensor:
    q = _paley_field(order)
    assert q is not None
    conference = torch.ones(q + 1, q + 1, dtype=torch.int8)
    conference[0, 0] = 0
    conference[1:, 1:] = _character_QQ(q)
    if order == q + 1:
        conference[1:, 0] = -1
        return conference + torch.eye(order, dtype=torch.int8)
    off_diagonal = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(conference, off_diagonal) + torch.kron(torch.eye(q + 1, dtype=torch.int8), diagonal)


@cache
def _paley_field(order: int) -> int | None:
    """Return the q of the field from which Paley makes a matrix of this ``order``."""
    if order % 4 == 0 and _prime_power(order - 1):
        return order - 1
    half = order // 2
    return half - 1 if order % 4 == 0 and half % 4 == 2 and _prime_power(half - 1) else None


def _character_QQ(q: int) -> torch.Tensor:
    """Return for elements a, b of GF(q): 1 if a - b is a square, -1 if it is not, 0 if a = b. int8 [Q, Q].

    The element a_0 + a_1 x + ... has the number a_0 + a_1 p + ...
    """
    field = _prime_power(q)
    assert field is not None
    p, degree = field
    powers = _powers_of_generator(p, degree)
    character_Q = torch.zeros(q, dtype=torch.int8)
    character_Q[powers[0::2]] = 1
    character_Q[powers[1::2]] = -1
    elements_Q = torch.arange(q, dtype=torch.int32)
    difference_QQ = torch.zeros(q, q, dtype=torch.int32)
    for place in (p**i for i in range(degree)):
        digits_Q = elements_Q // place % p
        difference_QQ += (digits_Q[:, None] - digits_Q) % p * place
    return character_Q[difference_QQ]


def _powers_of_generator(p: int, degree: int) -> list[int]:
    """Return 1, x, x^2, ..., all elements of GF(p^degree) but 0: x is a root of the first polynomial that allows it.

    Modulo a reducible polynomial x has fewer powers, so that none is mistaken for a field.
    """
    for low in product(range(1, p), *(range(p),) * (degree - 1)):  # x^degree + ... + low[1] x + low[0]
        power = one = (1, *(0,) * (degree - 1))
        powers: list[int] = []
        while len(powers) < p**degree - 1 and (power != one or not powers):
            powers.append(sum(digit * p**i for i, digit in enumerate(power)))
            power = tuple((below - power[-1] * c) % p for below, c in zip((0, *power[:-1]), low, strict=True))
        if power == one and len(powers) == p**degree - 1:
            return powers
    raise AssertionError(f"{p} is not prime")


@cache
def _prime_power(number: int) -> tuple[int, int] | None:
    """Return (p, k) with ``number`` = p^k, p an odd prime."""
    p = next((p for p in range(3, isqrt(max(number, 0)) + 1, 2) if number % p == 0), number)
    exponent, rest = 0, number
    while rest > 1 and rest % p == 0:
        exponent, rest = exponent + 1, rest // p
    return (p, exponent) if rest == 1 and number % 2 and exponent else None


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
