"""The Hessian of GPTQ and its successors: the damped Gram matrix of the inputs, put in order and factorized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantcore.errors import NumericsError

DAMP_GROWTH = 10.0
"""Factor by which insufficient damping is multiplied."""
MAX_DAMP_TRIES = 5
"""Number of tries of the factorization, each with more damping."""
PROBE_DAMPING = 1e-3
"""Damping for the factorization that estimates the damping that a matrix needs."""
DAMP_PER_INPUT = 8.0
"""Constant in the default damping of ``Hessian.of``.

The best value on other text was near this for inputs of attention and MLPs, from 512 to 16384 tokens; half or twice as
much costs a percent.
"""


@dataclass(frozen=True)
class Hessian:
    """H = gram + damping = U U^T, U upper triangular, of the inputs K in the order in which they are rounded.

    ``error_feedback_KK`` [k, l] = U_lk / U_kk, for l <= k: the share of an error in weight l that weight k compensates.
    ``squared_u_K`` = U_kk^2 = 1 / [H_F^-1]_kk, F the inputs from k on: the cost of an error in weight k while the
    inputs after it can still compensate it. ``row_scaled_KK`` [k, l] = H_kl / H_kk: the share of an error in weight l
    that weight k compensates if no other weight can move. ``gram_KK`` is without damping.
    """

    order_K: torch.Tensor
    damp_percent: float
    wanted: float  # the requested damp_percent; a larger one is used if it was not enough
    gram_KK: torch.Tensor
    error_feedback_KK: torch.Tensor
    row_scaled_KK: torch.Tensor
    squared_u_K: torch.Tensor
    diagonal_K: torch.Tensor  # H_kk, with damping

    @classmethod
    def of(
        cls,
        gram_II: torch.Tensor,
        num_tokens: int,
        order_K: torch.Tensor,
        damp_percent: float | None,
        dtype: torch.dtype,
    ) -> Hessian:
        """Add ``damp_percent`` of the mean diagonal to the diagonal and factorize; ten times as much if that fails.

        None chooses it by the number of tokens. With few tokens, errors seem to be free in directions in which these
        happen to have small values; so the damping is inputs / tokens times the geometric mean of the matrix's
        eigenvalues (of the inputs that are not dead), times a constant. Computed in ``dtype``. Raises NumericsError for
        a matrix that is not finite.
        """
        gram_KK = gram_II[order_K][:, order_K].to(dtype)
        if damp_percent is None:
            mean = gram_KK.diagonal().mean()
            alive_K = gram_KK.diagonal() > 0
            squared_u_K = _factorized(gram_KK, PROBE_DAMPING)[1].diagonal().square().flip(0)[alive_K]
            typical = (squared_u_K / mean).log().mean().exp()
            damp_percent = DAMP_PER_INPUT * len(squared_u_K) / num_tokens * typical.item()
        wanted = damp_percent
        damp_percent, lower_KK = _factorized(gram_KK, wanted)
        diagonal_K = gram_KK.diagonal() + damp_percent * gram_KK.diagonal().mean()
        upper_KK = lower_KK.flip(0, 1)
        del lower_KK  # these are the largest tensors of a job: hold as few of them as possible
        squared_u_K = upper_KK.diagonal().square()
        error_feedback_KK = upper_KK.div_(upper_KK.diagonal().clone()).T.float().contiguous()
        del upper_KK
        row_scaled_KK = gram_KK / diagonal_K.unsqueeze(1)
        row_scaled_KK.fill_diagonal_(1)
        return cls(
            order_K,
            damp_percent,
            wanted,
            gram_KK.float(),
            error_feedback_KK,
            row_scaled_KK.float(),
            squared_u_K.float(),
            diagonal_K.float(),
        )

    def solve(self, x_KO: torch.Tensor) -> torch.Tensor:
        """Return H^-1 x, [K, O]: H is F^T D F with F = ``error_feedback_KK`` and D = ``squared_u_K``."""
        x_KO = torch.linalg.solve_triangular(self.error_feedback_KK.T, x_KO, upper=True, unitriangular=True)
        x_KO.div_(self.squared_u_K.unsqueeze(1))
        lower_KK = self.error_feedback_KK
        solved: torch.Tensor = torch.linalg.solve_triangular(lower_KK, x_KO, upper=False, unitriangular=True)
        return solved


def _factorized(gram_KK: torch.Tensor, damp_percent: float) -> tuple[float, torch.Tensor]:
    """Return the damping that was enough, and the lower Cholesky factor of the damped matrix, its inputs reversed."""
    for _ in range(MAX_DAMP_TRIES):
        damped_KK = gram_KK.flip(0, 1)
        damped_KK.diagonal().add_(damp_percent * gram_KK.diagonal().mean())
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if (failed == 0) & lower_KK.diagonal().isfinite().all():
            return damp_percent, lower_KK
        damp_percent *= DAMP_GROWTH
    raise NumericsError(
        "The second moments of a layer's inputs cannot be factorized.",
        code="bad_statistics",
        hint="Activations overflow on the calibration text. Use other text, or the model in float32.",
    )


def order_of(diagonal_I: torch.Tensor, group_size: int | None, *, act_order: bool) -> torch.Tensor:
    """Return the order in which inputs are rounded: unchanged, or with ``act_order`` the largest mean square first.

    With a ``group_size``, for ranges found during rounding, groups stay together, in the order of the groups' means.
    """
    if not act_order:
        return torch.arange(len(diagonal_I), device=diagonal_I.device)
    if group_size is None:
        return diagonal_I.argsort(descending=True, stable=True)
    diagonal_JS = diagonal_I.view(-1, group_size)
    within_JS = diagonal_JS.argsort(dim=1, descending=True, stable=True)
    starts_J1 = torch.arange(0, len(diagonal_I), group_size, device=diagonal_I.device).unsqueeze(1)
    order_J = diagonal_JS.mean(1).argsort(descending=True, stable=True)
    return (within_JS + starts_J1).index_select(0, order_J).flatten()
