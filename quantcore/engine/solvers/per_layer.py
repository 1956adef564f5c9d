"""Makes a solver from one function that rounds one weight: the shortest way to try an algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic.dataclasses import dataclass

from quantcore.config.algorithms import ALGORITHMS, SolverConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.values import STRICT, Checked
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.solvers import NONE, GlobalScales, Weights
from quantcore.engine.solvers.rtn import observed_ranges
from quantcore.tensors.qtensor import QTensor

Function = TypeVar("Function", bound=Callable[..., QTensor])


class PerLayer:
    """Solves each layer by itself with ``round_weight(weight_OI, params, spec, stats, **options)``.

    ``params`` are the scales that the spec's observer finds in the weight [out, in].
    """

    def __init__(self, round_weight: Callable[..., QTensor], options: dict[str, Any], needs: Needs) -> None:
        self.needs = needs
        self.notes: list[str] = []
        self._round_weight = round_weight
        self._options = options

    def solve(
        self, weights: Weights, stats: Stats | None, global_scales: GlobalScales = NONE
    ) -> dict[LayerPlan, QTensor]:
        solved = {}
        for layer, weight_OI in weights.items():
            params = observed_ranges(weight_OI, layer.weight, global_scales.get(layer))
            solved[layer] = self._round_weight(weight_OI, params, layer.weight, stats, **self._options)
        return solved


def register_solver(name: str, *, gram: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the algorithm ``{"name": name}`` of this process.

    The function gets a weight [out, in], the scales that the spec's observer finds in it, the spec, and the statistics
    of the layer's input (``Stats``; with ``gram_II`` if ``gram``). It returns the codes with their scales, like
    ``quantize_weight``. Its keyword-only arguments, each with a default, are the algorithm's options. Running it again,
    as in a notebook, replaces the function. Raises ConfigError for a name that is taken.
    """

    def register(function: Function) -> Function:
        arguments = inspect.signature(function, eval_str=True).parameters.values()
        options = [argument for argument in arguments if argument.kind is argument.KEYWORD_ONLY]

        def create(config: Any) -> PerLayer:
            values = {option.name: getattr(config, option.name) for option in options}
            return PerLayer(function, values, Needs(gram=gram))

        kinds = {option.name: Any if option.annotation is option.empty else option.annotation for option in options}
        defaults = {option.name: option.default for option in options if option.default is not option.empty}
        body = {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "create": create,
            "num_grams": int(gram),
            "__annotations__": {"name": Literal[name], **kinds},
            "name": name,
            **defaults,
        }
        made: Any = Checked(f"{name.title().replace('_', '')}Config", (SolverConfig,), body)
        ALGORITHMS.put(name, dataclass(frozen=True, kw_only=True, config=STRICT)(made))
        return function

    return register
