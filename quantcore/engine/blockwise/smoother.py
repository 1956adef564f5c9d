"""Moves scales along the edges of a block, as SmoothQuant, AutoSmoothQuant and AWQ choose them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from torch import nn

from quantcore.checkpoint.experts import find_moes
from quantcore.checkpoint.roles import find_recurrences
from quantcore.config.algorithms import AlgoConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.engine.blockwise.running_block import RunningBlock
from quantcore.engine.calibration.expert_token_topup import MIN_TOKENS
from quantcore.engine.calibration.stats import Needs, Stats
from quantcore.engine.transforms import SMOOTHINGS, Consumer, Smoothing
from quantcore.engine.transforms.mappings.discovery import FoundEdges, listed_edges
from quantcore.engine.transforms.mappings.scale_pair import ScalePair, kind_of
from quantcore.errors import NumericsError
from quantcore.events import Warned
from quantcore.formats.weight_layout import canonical

MAX_UPDATE_CHANGE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest relative change of a block's update by folding: rounding of the folded weights gives less, a fault far more.
"""
MAX_UPDATE_CHANGE_OF_RECURRENCES = 0.1
"""Upper bound for a block with a recurrence in bfloat16, whose gates are kept, round, and act on all later tokens."""
MAX_UPDATE_CHANGE_OF_EXPERTS = 0.3
"""Upper bound for a block with experts in a 16-bit dtype, where a rounded router may send a token to another expert."""


class Smoother:
    """The smoothings of a job, in the order of its ``configs``."""

    def __init__(self, configs: Sequence[AlgoConfig]) -> None:
        self._smoothings: list[tuple[AlgoConfig, Smoothing]] = [
            (config, SMOOTHINGS.get(config.name)(config)) for config in configs
        ]
        self._warned_of: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._smoothings)

    @property
    def needs(self) -> Needs:
        """The union of the smoothings' needs from calibration."""
        return reduce(or_, (smoothing.needs for _, smoothing in self._smoothings), Needs())

    def smooth(
        self, at: RunningBlock, discovery: FoundEdges, names: dict[LayerPlan, str], stats: dict[str, Stats]
    ) -> tuple[set[str], list[Warned]]:
        """Choose and fold the scales of all edges, one smoothing after the other; ``stats`` follow.

        Returns the names of the parameters that changed, and warnings for listed edges that do not hold.
        """
        planned = {name: layer for layer, name in names.items()}
        changed: set[str] = set()
        refused: list[Warned] = []
        for config, smoothing in self._smoothings:
            listing = getattr(config, "scaling_layers", ())
            listed = listed_edges(at.block, at.update, listing, discovery) if listing else discovery
            if listing:
                refused += self._refused(listed)
            for edge in listed.edges:
                consumers = [
                    Consumer(_weight(at.block, name), stats[name], planned.get(name))
                    for name in edge.consumers
                    if name in stats and stats[name].num_tokens >= MIN_TOKENS
                ]
                if all(consumer.layer is None for consumer in consumers):
                    continue
                scale = smoothing.choose(edge.on(consumers[0].weight.device), consumers)
                if scale is not None:
                    changed.update(edge.fold(at.block, scale))
                    _divide(stats, edge, scale)
        return changed, refused

    def _refused(self, listed: FoundEdges) -> list[Warned]:
        """Return a warning for each edge of ``scaling_layers`` that does not hold, once per model."""
        new = [edge for edge in listed.rejected if (edge.producer, edge.consumers) not in self._warned_of]
        self._warned_of.update((edge.producer, edge.consumers) for edge in new)
        return [
            Warned(
                "edge_rejected",
                f"No scale can move from {edge.producer} to {', '.join(edge.consumers)}, as scaling_layers "
                f"requires: {edge.reason}.",
            )
            for edge in new
        ]


def _weight(block: nn.Module, name: str) -> torch.Tensor:
    """Return the weight [out, in], which may be sharded."""
    module = block.get_submodule(name)
    return canonical(module.get_parameter("weight"), kind_of(module))


def _divide(stats: dict[str, Stats], edge: ScalePair, scale_F: torch.Tensor) -> None:
    """Let the statistics of the edge's consumers, and of its producer's outputs, follow the fold.

    Those that were one object stay one.
    """
    before = {name: stats[name] for name in edge.consumers if name in stats}
    after = {id(input_stats): input_stats.divided(edge.spread(scale_F)) for input_stats in before.values()}
    stats.update({name: after[id(input_stats)] for name, input_stats in before.items()})
    if edge.producer in stats and edge.producer in stats[edge.producer].outputs:
        own = stats[edge.producer]
        changed = own.with_outputs_divided(edge.producer, edge.rows, scale_F)
        stats.update({name: changed for name, input_stats in stats.items() if input_stats is own})


def check_fold(at: RunningBlock, error: float, dtype: torch.dtype) -> None:
    """Raise NumericsError if folding changed the update of a block by more than rounding explains."""
    limit, shapes = MAX_UPDATE_CHANGE[dtype], {name: p.shape for name, p in at.block.named_parameters()}
    if find_moes(shapes) and dtype != torch.float32:
        limit = MAX_UPDATE_CHANGE_OF_EXPERTS
    elif dtype == torch.bfloat16 and find_recurrences(shapes):
        limit = MAX_UPDATE_CHANGE_OF_RECURRENCES
    if error <= limit:
        return
    raise NumericsError(
        f"Moving scales changed the output of decoder block {at.index} by {error:.1e} of its update; the limit is "
        f"{limit:.0e} for {dtype}.",
        code="fold_changed_the_model",
        hint="Remove smoothquant, autosmoothquant and awq, or use a float32 checkpoint.",
    )
