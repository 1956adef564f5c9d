"""The order of the algorithms in a chain: transforms, at most one solver, corrections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantcore.config.algorithms import CorrectionConfig, SolverConfig


def check_chain(algo_config: Sequence[Any]) -> None:
    """Raise ValueError unless ``algo_config`` is transforms, at most one solver, corrections: each kind once."""
    solvers: list[Any] = [algorithm for algorithm in algo_config if isinstance(algorithm, SolverConfig)]
    if len(solvers) > 1:
        names = " and ".join(solver.name for solver in solvers)
        raise ValueError(f"{names} both round the weights: use only one of them in a chain")
    in_order = sorted(algo_config, key=_place)
    if in_order != list(algo_config):
        late = next(after for after, before in zip(algo_config, in_order, strict=True) if after is not before)
        what = "rounds the weights" if late in solvers else "corrects rounding errors"
        raise ValueError(f"{late.name} {what}, so it comes last: {', '.join(algorithm.name for algorithm in in_order)}")
    kinds = [type(algorithm) for algorithm in algo_config]
    twice = next((algorithm for algorithm in algo_config if kinds.count(type(algorithm)) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice.name} is listed twice")


def _place(algorithm: Any) -> int:
    return 2 if isinstance(algorithm, CorrectionConfig) else int(isinstance(algorithm, SolverConfig))
