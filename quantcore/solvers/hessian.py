"""What GPTQ and its kin know of the inputs: the damped Gram matrix, put in order and factorized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantcore.errors import NumericsError

MORE, TRIES = 10.0, 5
"""Where damping was not enough it grows by this factor, and at most so often is it tried."""
LEAST = 1e-3
"""The damping under which a matrix shows how much damping it calls for."""
NOISE = 8.0
"""See ``Hessian.of``. What is best on other text was near this for inputs of attention and MLPs, from 512 to 16384
tokens; half or twice as much costs a percent."""


@dataclass(frozen=True)
class Hessian:
    """H = gram + damping = U U^T, U upper triangular, of the inputs K in the order in which they are rounded.

    ``feedback_KK`` [k, l] = U_lk / U_kk, for l <= k, is the share of an error in weight l that weight k makes good;
    ``counts_K`` = U_kk^2 is what an error in weight k costs while the inputs after it can still make it good.
    ``coupling_KK`` [k, l] = H_kl / H_kk is the share where no other weight can move. ``gram_KK`` is without damping.
    """

    order_K: torch.Tensor
    damp_percent: float
    wanted: float  # what damp_percent would be if that were enough
    gram_KK: torch.Tensor
    feedback_KK: torch.Tensor
    coupling_KK: torch.Tensor
    counts_K: torch.Tensor
    power_K: torch.Tensor  # the diagonal of H

    @classmethod
    def of(
        cls, gram_II: torch.Tensor, num_tokens: int, order_K: torch.Tensor, damp_percent: float | None,
        dtype: torch.dtype,
    ) -> Hessian:  # fmt: skip
        """With ``damp_percent`` of the mean diagonal added to the diagonal; ten times as much where that is too little.

        None is as much as the number of tokens calls for. Directions in which few tokens happen to have little power
        look as if errors were free there; so the damping is inputs / tokens times the geometric mean of the matrix'
        eigenvalues (of the inputs that are not dead), times a constant. Computed in ``dtype``. Raises NumericsError for
        a matrix that is not finite.
        """
        gram_KK = gram_II[order_K][:, order_K].to(dtype)
        if damp_percent is None:
            mean = gram_KK.diagonal().mean()
            alive_K = gram_KK.diagonal() > 0
            counts_K = _factorized(gram_KK, LEAST)[1].diagonal().square().flip(0)[alive_K]
            typical = (counts_K / mean).log().mean().exp()
            damp_percent = NOISE * len(counts_K) / num_tokens * typical.item()
        wanted = damp_percent
        damp_percent, lower_KK = _factorized(gram_KK, wanted)
        power_K = gram_KK.diagonal() + damp_percent * gram_KK.diagonal().mean()
        upper_KK = lower_KK.flip(0, 1)
        del lower_KK  # these are the largest tensors of a job: no more of them than it takes
        counts_K = upper_KK.diagonal().square()
        feedback_KK = upper_KK.div_(upper_KK.diagonal().clone()).T.float().contiguous()
        del upper_KK
        coupling_KK = gram_KK / power_K.unsqueeze(1)
        coupling_KK.fill_diagonal_(1)
        return cls(
            order_K, damp_percent, wanted, gram_KK.float(), feedback_KK, coupling_KK.float(), counts_K.float(),
            power_K.float(),
        )  # fmt: skip

    def solve(self, x_KO: torch.Tensor) -> torch.Tensor:
        """H^-1 x, [K, O]. With F = feedback and D = counts, H is F^T D F."""
        x_KO = torch.linalg.solve_triangular(self.feedback_KK.T, x_KO, upper=True, unitriangular=True)
        x_KO.div_(self.counts_K.unsqueeze(1))
        solved: torch.Tensor = torch.linalg.solve_triangular(self.feedback_KK, x_KO, upper=False, unitriangular=True)
        return solved


def _factorized(gram_KK: torch.Tensor, damp_percent: float) -> tuple[float, torch.Tensor]:
    """The damping that was enough, and the lower Cholesky factor of the damped matrix with its inputs reversed."""
    for _ in range(TRIES):
        damped_KK = gram_KK.flip(0, 1)
        damped_KK.diagonal().add_(damp_percent * gram_KK.diagonal().mean())
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if not failed and lower_KK.diagonal().isfinite().all():
            return damp_percent, lower_KK
        damp_percent *= MORE
    raise NumericsError(
        "The second moments of a layer's inputs cannot be factorized.",
        code="bad_statistics",
        hint="Activations overflow on the calibration text. Take other text, or the model in float32.",
    )


def order_of(power_I: torch.Tensor, run: int | None, *, by_power: bool) -> torch.Tensor:
    """The order in which inputs are rounded: as they stand, or most power first.

    Where ranges are found on the way, runs of ``run`` inputs stay together, in the order of their mean power.
    """
    if not by_power:
        return torch.arange(len(power_I), device=power_I.device)
    if run is None:
        return power_I.argsort(descending=True, stable=True)
    power_JS = power_I.view(-1, run)
    within_JS = power_JS.argsort(dim=1, descending=True, stable=True)
    starts_J1 = torch.arange(0, len(power_I), run, device=power_I.device).unsqueeze(1)
    order_J = power_JS.mean(1).argsort(descending=True, stable=True)
    return (within_JS + starts_J1).index_select(0, order_J).flatten()
