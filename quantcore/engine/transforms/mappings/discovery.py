"""Discovers the edges of a decoder block by recording a run of it, and proves them. It needs no table of architectures.

For every tensor that linear layers read, ``tracing`` proposes the outputs of the norm or linear layer that it comes
from. A proposal becomes an edge if a scale passes (no activation between the two changes it), if only the linear layers
read those outputs, and if the real block still computes the same with random scales folded through all edges at once
(``proof``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from quantcore.config.quark_layers import ScalingLayer
from quantcore.engine.transforms.mappings.proof import hold, prove
from quantcore.engine.transforms.mappings.record import Run, record_block
from quantcore.engine.transforms.mappings.scale_pair import FoundEdges, Rejected, ScalePair, shape_of
from quantcore.engine.transforms.mappings.search import Search

__all__ = ["EdgeFinder", "FoundEdges", "Rejected", "find_edges", "listed_edges", "prove"]


class EdgeFinder:
    """Finds the edges of one block after another. For blocks of the same structure only the proof is repeated."""

    def __init__(self) -> None:
        self._by_structure: dict[object, FoundEdges] = {}

    def find(self, block: nn.Module, run: Run) -> FoundEdges:
        """Find the edges as ``find_edges`` does, in two runs if a block of the same structure came before."""
        structure = tuple(
            (
                name,
                type(module).__qualname__,
                *((key, p.shape) for key, p in module._parameters.items() if p is not None),
            )
            for name, module in block.named_modules()
        )
        edges = self._by_structure.get(structure)
        if edges is None or not hold(block, prove(block, run, edges.edges)):
            edges = self._by_structure[structure] = find_edges(block, run)
        return edges


def find_edges(block: nn.Module, run: Run) -> FoundEdges:
    """Find and prove all edges of ``block``. ``run`` runs it on some tokens and returns what it adds to the states.

    The block itself is run twice (three times with norms that multiply with 1 + weight), and ten to thirty times with
    given layer outputs, where no layer computes. Its weights are restored bit for bit. Mixtures must be split
    (``engine.model.experts``), and nothing may be cached between runs.
    """
    plain = record_block(block, run)
    search = Search(block, run, plain)
    edges = search.proven(search.weighted(search.reached(search.alone(search.passing()))))
    order = {name: i for i, name in enumerate(plain.arguments)}
    return FoundEdges(
        tuple(sorted(edges, key=lambda edge: order[edge.consumers[0]])),
        tuple(sorted(search.rejected, key=lambda edge: order[edge.consumers[0]])),
    )


def listed_edges(
    block: nn.Module, run: Run, scaling_layers: Iterable[ScalingLayer], discovery: FoundEdges
) -> FoundEdges:
    """Return the edges that a config file of AMD Quark lists, by names inside the block.

    Edges of ``discovery`` keep all their consumers, because a scale must reach every reader. Others are tried with the
    channels in plain order. An edge that does not hold is in ``rejected``, with discovery's reason if there is one.
    """
    edges: dict[tuple[str, tuple[str, ...]], ScalePair] = {}
    rejected: list[Rejected] = []
    for listed in scaling_layers:
        readers = set(listed.layers)
        discovered = [e for e in discovery.edges if e.producer == listed.prev_op and readers <= set(e.consumers)]
        tried = discovered[0] if discovered else _tried(block, run, listed, discovery)
        if isinstance(tried, Rejected):
            rejected.append(tried)
        else:
            edges[tried.producer, tried.consumers] = tried
    return FoundEdges(tuple(edges.values()), tuple(rejected))


def _tried(block: nn.Module, run: Run, listed: ScalingLayer, discovery: FoundEdges) -> ScalePair | Rejected:
    """Try a listed edge that discovery does not have, with its channels in plain order."""

    def rejected(reason: str) -> Rejected:
        return Rejected(listed.prev_op, listed.layers, reason)

    modules = dict(block.named_modules())
    for name in (listed.prev_op, *listed.layers):
        if not isinstance(getattr(modules.get(name), "weight", None), nn.Parameter):
            return rejected(f"the block has no layer {name} with a weight")
    for failed in discovery.rejected:
        if failed.producer == listed.prev_op and set(listed.layers) <= set(failed.consumers):
            return rejected(failed.reason)
    shape = shape_of(modules[listed.prev_op])
    count = shape[0]
    for name in listed.layers:
        other = shape_of(modules[name])
        if len(other) != 2 or other[1] != count:
            return rejected(f"{listed.prev_op} has {count} outputs, but {name} has a weight of {tuple(other)}")
    plain = ScalePair(listed.prev_op, listed.layers, torch.arange(count), torch.arange(count))
    edges = [plain, replace(plain, plus_one=True)] if len(shape) == 1 else [plain]
    changes = [prove(block, run, [edge]) for edge in edges]
    if not hold(block, min(changes)):
        return rejected(f"a scale folded through it changes the block by {min(changes):.1e}")
    return edges[changes.index(min(changes))]
