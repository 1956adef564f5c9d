"""The cost of candidates for scales and zero points, in units of the layer's output.

Legend: C candidates, J groups of inputs that share parameters, S inputs of a tile, N of its outputs (see ``groups``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.stats import Stats
from quantcore.engine.solvers.groups import GroupParams, Groups
from quantcore.engine.solvers.ranges import FullRange
from quantcore.formats.vectors import snap_
from quantcore.tensors.affine import QParams

TILE_INPUTS = 128
"""Number of inputs whose errors are weighted together; larger groups are divided into tiles treated as independent."""
NUM_OUTPUTS = 1024  # rows that are processed at a time: with a tile of inputs they stay in a core's cache
NUM_AT_ONCE = 1 << 25  # weights of all candidates that are rounded at a time on a GPU, where launches cost more


@dataclass(frozen=True)
class Tile:
    """Weights [S, N] (inputs, outputs) and the weights of their errors.

    Errors e cost sum(diagonal * e^2), or, with ``gram_SS``, e^T gram e + 2 e^T cross, where ``cross_SN`` is the effect
    of errors of other weights of the row. ``first_SN`` are the codes of the first of two stages, None for one stage.
    """

    weight_SN: torch.Tensor
    hessian_diagonal_S: torch.Tensor
    gram_SS: torch.Tensor | None = None
    cross_SN: torch.Tensor | None = None
    first_SN: torch.Tensor | None = None

    def of(self, outputs: slice) -> Tile:
        """Return the tile of some outputs."""
        cross_SN = None if self.cross_SN is None else self.cross_SN[:, outputs]
        first_SN = None if self.first_SN is None else self.first_SN[:, outputs]
        return replace(self, weight_SN=self.weight_SN[:, outputs], cross_SN=cross_SN, first_SN=first_SN)

    def repeated(self, times: int) -> Tile:
        """Return the tile with all its outputs so many times, one after the other."""
        cross_SN = None if self.cross_SN is None else self.cross_SN.repeat(1, times)
        first_SN = None if self.first_SN is None else self.first_SN.repeat(1, times)
        return replace(self, weight_SN=self.weight_SN.repeat(1, times), cross_SN=cross_SN, first_SN=first_SN)

    def rounded(self, params: GroupParams, spec: QuantizationSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights in steps, with the zero point added, and their rounded values, [S, N] each."""
        w_SN = self.weight_SN
        x_SN = w_SN / params.step if params.zero is None else torch.addcdiv(params.zero, w_SN, params.step)
        start_SN = x_SN.clone() if self.first_SN is None else self.first_SN / params.scale
        return x_SN, spec.format.round_(snap_(spec.format, start_SN, 0), spec.round_method.value)

    def errors(self, params: GroupParams, spec: QuantizationSpec) -> torch.Tensor:
        """Return the cost of all candidates [C, N], as if they were more outputs."""
        num_candidates, num_outputs = params.scale.shape
        if num_candidates == 1:
            return self.error(params.at(0), spec).unsqueeze(0)
        zero = None if params.zero is None else params.zero.flatten()
        flat = GroupParams(params.scale.flatten(), params.step.flatten(), zero)
        return self.repeated(num_candidates).error(flat, spec).view(num_candidates, num_outputs)

    def error(self, params: GroupParams, spec: QuantizationSpec) -> torch.Tensor:
        """Return the cost of one candidate, [N]."""
        e_SN = self._lost_steps(params, spec)
        if self.gram_SS is None:
            return (self.hessian_diagonal_S @ e_SN.square_()).mul_(params.step).mul_(params.step)
        cost_N: torch.Tensor = torch.linalg.vecdot(self.gram_SS @ e_SN, e_SN, dim=0).mul_(params.step)
        if self.cross_SN is not None:
            cost_N += torch.linalg.vecdot(self.cross_SN, e_SN, dim=0).mul_(2)
        return cost_N.mul_(params.step)

    def fit(self, params: GroupParams, spec: QuantizationSpec) -> torch.Tensor:
        """Return numerator and denominator [2, N] of the best step for the codes."""
        codes_SN = self.rounded(params, spec)[1]
        if params.zero is not None:
            codes_SN -= params.zero
        diagonal_S1 = self.hessian_diagonal_S.unsqueeze(1)
        counted_SN = codes_SN * diagonal_S1 if self.gram_SS is None else self.gram_SS @ codes_SN
        above_N = torch.linalg.vecdot(counted_SN, self.weight_SN, dim=0)
        if self.cross_SN is not None:
            above_N += torch.linalg.vecdot(codes_SN, self.cross_SN, dim=0)
        return torch.stack([above_N, torch.linalg.vecdot(counted_SN, codes_SN, dim=0)])

    def lost(self, params_N: QParams, spec: QuantizationSpec) -> torch.Tensor:
        """Return the weights minus their dequantized codes."""
        return self._lost_steps(GroupParams.of(params_N), spec).mul_(params_N.step)

    def _lost_steps(self, params: GroupParams, spec: QuantizationSpec) -> torch.Tensor:
        x_SN, codes_SN = self.rounded(params, spec)
        return x_SN.sub_(codes_SN)


@dataclass(frozen=True)
class Metric:
    """The weights of errors in a row: the Hessian's diagonal alone, or a Gram matrix as well.

    The diagonal is the mean square of each input.
    """

    hessian_diagonal_I: torch.Tensor
    gram_II: torch.Tensor | None = None

    @classmethod
    def of_gram(cls, gram_II: torch.Tensor) -> Metric:
        """Make the metric from the mean of x x^T of the inputs."""
        return cls(gram_II.diagonal().float(), gram_II.float())

    @classmethod
    def of_stats(cls, stats: Stats) -> Metric | None:
        """Make the metric from the statistics of the inputs; of their mean squares alone if nothing else is known."""
        if stats.gram_II is not None:
            return cls.of_gram(stats.gram_II)
        return None if stats.diagonal_I is None else cls(stats.diagonal_I.float())

    def tiles(
        self, weight_SN: torch.Tensor, inputs: slice, full: FullRange, cross_SN: torch.Tensor | None = None
    ) -> list[Tile]:
        """Return the weights of some inputs as tiles of at most ``TILE_INPUTS`` inputs."""
        first_SN = None
        if full.spec.over is not None and full.global_scale is not None:
            first_SN = full.spec.over.format.round(weight_SN / full.global_scale)
        hessian_diagonal_S = self.hessian_diagonal_I[inputs]
        gram_SS = None if self.gram_II is None else self.gram_II[inputs, inputs]
        return [
            Tile(
                weight_SN[part],
                hessian_diagonal_S[part],
                None if gram_SS is None else gram_SS[part, part],
                None if cross_SN is None else cross_SN[part],
                None if first_SN is None else first_SN[part],
            )
            for part in (slice(start, start + TILE_INPUTS) for start in range(0, len(weight_SN), TILE_INPUTS))
        ]


class GroupMeasure:
    """Measures one group of inputs, whose parameters [N] belong to single outputs, in one or more tiles."""

    def __init__(self, tiles: Sequence[Tile], spec: QuantizationSpec) -> None:
        self._tiles, self._spec = tiles, spec

    def errors(self, params_CP: QParams) -> torch.Tensor:
        params = GroupParams.of(params_CP)
        error_CN = torch.zeros_like(params_CP.scale)
        for outputs, tile in self._parts():
            num = 1 if tile.weight_SN.is_cpu else max(1, NUM_AT_ONCE // tile.weight_SN.numel())
            for candidates in (slice(start, start + num) for start in range(0, len(error_CN), num)):
                parts = params.at((candidates, outputs))
                error_CN[candidates, outputs] += tile.errors(parts, self._spec)
        return error_CN

    def fit(self, params_P: QParams) -> torch.Tensor:
        sums_2N = self.fit_parts(params_P)
        return sums_2N[0] / sums_2N[1]

    def fit_parts(self, params_P: QParams) -> torch.Tensor:
        """Return numerator and denominator [2, N] of ``fit``."""
        params = GroupParams.of(params_P)
        sums_2N = torch.zeros(2, *params_P.scale.shape, device=params_P.scale.device)
        for outputs, tile in self._parts():
            sums_2N[:, outputs] += tile.fit(params.at(outputs), self._spec)
        return sums_2N

    def _parts(self) -> Iterator[tuple[slice, Tile]]:
        """Yield the tiles in parts of outputs that fit a core's cache; whole on other devices."""
        num_outputs = self._tiles[0].weight_SN.shape[1]
        size = NUM_OUTPUTS if self._tiles[0].weight_SN.is_cpu else num_outputs
        for start in range(0, num_outputs, size):
            outputs = slice(start, start + size)
            for tile in self._tiles:
                yield outputs, tile.of(outputs)


class PooledMeasure:
    """Measures a whole weight whose rows share parameters [R, G], with a measure for each group of inputs."""

    def __init__(self, groups: Groups, measures: Sequence[GroupMeasure]) -> None:
        self._groups, self._measures = groups, measures

    def errors(self, params_CP: QParams) -> torch.Tensor:
        errors_J = [measure.errors(own) for measure, own in zip(self._measures, self._spread(params_CP), strict=True)]
        return self._groups.pool(torch.stack(errors_J, dim=-2))

    def fit(self, params_P: QParams) -> torch.Tensor:
        sums_J2N = [measure.fit_parts(own) for measure, own in zip(self._measures, self._spread(params_P), strict=True)]
        sums_2RG = self._groups.pool(torch.stack(sums_J2N, dim=1))
        return sums_2RG[0] / sums_2RG[1]

    def _spread(self, params: QParams) -> Iterator[QParams]:
        """Yield the parameters [..., N] of every group."""
        scale_JN = self._groups.spread(params.scale)
        zero_JN = None if params.zero_point is None else self._groups.spread(params.zero_point)
        for group in range(len(self._measures)):
            zero_N = None if zero_JN is None else zero_JN[..., group, :]
            yield QParams(scale_JN[..., group, :], zero_N, params.global_scale)
