"""The comparison of a peer's scales and codes with ours."""

from __future__ import annotations

import torch

from quantcore.config.grouping import weight_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.tensors import affine
from quantcore.tensors.affine import QParams
from tests.consumers.peers_cases import E8M0_MODES, Case

Tensors = dict[str, torch.Tensor]
TINY = torch.finfo(torch.float32).tiny
ULP = 2.0**-22
"""Two units in the last place: the error of a rounded reciprocal and a product of two scales."""


def spec_of(case: Case) -> QuantizationSpec:
    scale_type = {"nvfp4": "e4m3", "pof2": "pof2"} | dict.fromkeys(E8M0_MODES, "e8m0")
    over = QuantizationSpec(dtype="fp8_e4m3", scale_type="float32") if case.rule == "two_level" else None
    return QuantizationSpec(
        dtype=case.dtype, qscheme=case.scheme, group_size=case.group_size, over=over,
        ch_axis={"per_channel": 0, "per_group": -1}.get(case.scheme), block_size=case.block_size,
        symmetric=case.rule not in ("asymmetric", "float_zero_point"),
        scale_type=scale_type.get(case.rule, "float32"),
        scale_calculation_mode=case.rule if case.rule in E8M0_MODES else None,
        zero_point_type="float32" if case.rule == "float_zero_point" else "int32",
    )  # fmt: skip


def find_params(case: Case, x_RGS: torch.Tensor) -> QParams:
    return affine.find_params(*affine.min_max(x_RGS), spec_of(case), torch.float32)


def given_params(case: Case, found: Tensors, shape: tuple[int, ...]) -> QParams:
    """Return the peer's scales as ours. compressed-tensors stores the reciprocal of the global scale."""
    zero_point, global_scale = found.get("zero_point"), found.get("global_scale")
    if global_scale is not None:
        global_scale = global_scale.reshape(()).float()
        global_scale = 1 / global_scale if case.peer == "compressed_tensors" else global_scale
    zero_point = None if zero_point is None else zero_point.reshape(shape)
    return QParams(found["scale"].float().reshape(shape), zero_point, global_scale)


def largest(x_RGS: torch.Tensor) -> torch.Tensor:
    return x_RGS.abs().amax(-1)


def is_near(x: torch.Tensor, places: tuple[float, ...]) -> torch.Tensor:
    """Return a mask: the fraction of x in [1, 2) is one of ``places`` to within the rounding of a float32 logarithm."""
    fraction = torch.frexp(x)[0] * 2
    return torch.stack([(fraction - place).abs() <= 2.0**-18 for place in places]).any(0)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    different = (ours != theirs).nonzero()
    at = tuple(different[0].tolist()) if len(different) else ()
    assert not len(different), (
        f"{where}: {len(different)} differ, first {list(at)}: {ours[at]}, the peer's {theirs[at]}"
    )


def assert_same_but_ties(
    ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, grid: list[float], slack: torch.Tensor, where: str
) -> None:
    """Assert that levels differ only where the exact quotient (float64) is half-way between them, within ``slack``."""
    rank = [torch.searchsorted(torch.tensor(grid), levels.contiguous()) for levels in (ours, theirs)]
    middle = (ours.double() + theirs.double()) / 2
    is_tie = ((rank[0] - rank[1]).abs() == 1) & ((exact - middle).abs() <= slack)
    assert_same(torch.where(is_tie, theirs, ours), theirs, where)


def exact_quotient(case: Case, x_RGS: torch.Tensor, params: QParams, found: Tensors) -> tuple[torch.Tensor, ...]:
    """Return the value that the peer rounds, and the sum of the magnitudes of its terms, in float64."""
    step = params.scale.double()
    if case.rule == "two_level":
        x_RGS = weight_grouping(spec_of(case)).split(found["fp8"])
    elif params.global_scale is not None:
        step = step * params.global_scale.double()
    quotient = x_RGS.double() / step.unsqueeze(-1)
    if params.zero_point is None:
        return quotient, quotient.abs()
    zero_point = params.zero_point.double().unsqueeze(-1)
    return quotient + zero_point, quotient.abs() + zero_point.abs()
