"""Searches a block's edges in steps: the proposals, the tests that each must pass, the reasons for rejection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quantcore.engine.transforms.mappings.proof import (
    divided,
    exact_norms,
    folding_changes,
    hold,
    random_scales,
    relative_change,
)
from quantcore.engine.transforms.mappings.record import BlockRecord, Run, find_layers, record_block, widened
from quantcore.engine.transforms.mappings.scale_pair import Rejected, ScalePair, shape_of
from quantcore.engine.transforms.mappings.tracing import FACTOR_TOLERANCE, Reading, Replay, trace

NO_PASSAGE = "the operations between them do not pass a scale through"
NO_PRODUCER = "their input is not the channel-wise output of one layer"
NO_WEIGHT = "the norm has no weight that could absorb a scale"
OTHER_READER = "its output has other readers"
SEVERAL = "it runs more than once, or reads more than one tensor"
OTHER_WEIGHT = "it multiplies neither with its weight nor with 1 + its weight"
NORM_TOLERANCE = 1e-3  # for each channel, in float32; a fold by the wrong convention misses by half and more
UNTOUCHED = 1e-6  # bound on the change of tensors that do not depend on the scaled outputs


class Search:
    """The steps of ``discovery.find_edges``; each returns the edges that pass and notes the rejected ones."""

    def __init__(self, block: nn.Module, run: Run, plain: BlockRecord) -> None:
        self.block, self.run, self.plain = block, run, plain
        self.rejected: list[Rejected] = []
        self._replay = Replay(block, run, plain)
        with self._replay.widening():
            self._readings = trace(self._replay)
            self._noise = self._replay.noise(tiny=False)
            self._before = self._replay.record(self._noise, {})

    def passing(self) -> list[ScalePair]:
        """Return the first candidate of each reading that scales pass through; the same outputs make one edge."""
        passing: list[ScalePair] = []
        waiting = list(self._readings)
        for attempt in range(2):
            waiting = [reading for reading in waiting if len(reading.candidates) > attempt]
            tried = [reading.candidates[attempt] for reading in waiting]
            passed = self._scaled_alike(tried)
            passing += [edge for edge, ok in zip(tried, passed, strict=True) if ok]
            waiting = [reading for reading, ok in zip(waiting, passed, strict=True) if not ok]
        linked = {edge.consumers for edge in passing}
        self.rejected += [self._without_producer(r) for r in self._readings if r.names not in linked]
        self.rejected += [Rejected(None, (name,), SEVERAL) for name in self._replay.others]
        return _merged(passing)

    def alone(self, edges: list[ScalePair]) -> list[ScalePair]:
        """Keep edges whose outputs only their consumers read: all of them, or those left by halving."""
        rows = [(edge.producer, row) for edge in edges for row in edge.rows.tolist()]
        others = self._other_readers(edges) if edges else []
        if not others and len(rows) == len(set(rows)):
            return edges
        if len(edges) == 1:
            self._reject(edges[0], f"{OTHER_READER} ({', '.join(others[:3])})")
            return []
        half = len(edges) // 2
        return self.alone(edges[:half]) + self.alone(edges[half:])

    def reached(self, edges: list[ScalePair]) -> list[ScalePair]:
        """Drop edges whose outputs a layer that did not run may read as well, since no run would show it."""
        idle: dict[int, str] = {}
        for name, module in find_layers(self.block).items():
            weight = getattr(module, "weight", None)
            if name not in self.plain.outputs and isinstance(weight, nn.Parameter) and weight.ndim == 2:
                idle.setdefault(shape_of(module)[1], name)
        reached: list[ScalePair] = []
        for edge in edges:
            if len(edge.channels) in idle:
                self._reject(edge, f"{idle[len(edge.channels)]} did not run, and may also read its output")
            else:
                reached.append(edge)
        return reached

    def weighted(self, edges: list[ScalePair]) -> list[ScalePair]:
        """Set ``plus_one`` where a norm multiplies by 1 + weight; reject norms that multiply by neither."""
        weighted: list[ScalePair] = []
        for edge in edges:
            is_norm = len(shape_of(self.block.get_submodule(edge.producer))) == 1
            if not is_norm or self._divides(edge):
                weighted.append(edge)
            elif self._divides(other := replace(edge, plus_one=True)):
                weighted.append(other)
            else:
                self._reject(edge, OTHER_WEIGHT)
        return weighted

    def proven(self, edges: list[ScalePair]) -> list[ScalePair]:
        """Keep edges that hold together in the real block: all of them, or those left by halving."""
        with exact_norms(self.block, edges):
            before = record_block(self.block, self.run) if any(edge.plus_one for edge in edges) else self.plain
            return self._holding(edges, before)

    def _holding(self, edges: list[ScalePair], before: BlockRecord) -> list[ScalePair]:
        change = folding_changes(self.block, self.run, edges, before) if edges else 0.0
        if hold(self.block, change):
            return edges
        if len(edges) == 1:
            self._reject(edges[0], f"a scale folded through it changes the block by {change:.1e}")
            return []
        half = len(edges) // 2
        left, right = self._holding(edges[:half], before), self._holding(edges[half:], before)
        if not left or not right:
            return left + right
        if hold(self.block, folding_changes(self.block, self.run, left + right, before)):
            return left + right
        for edge in right:
            self._reject(edge, f"it does not hold together with the edge after {left[0].producer}")
        return left

    def _reject(self, edge: ScalePair, reason: str) -> None:
        self.rejected.append(Rejected(edge.producer, edge.consumers, reason))

    def _scaled(self, edges: Sequence[ScalePair]) -> tuple[BlockRecord, dict[str, torch.Tensor]]:
        """Run the block with the outputs of all edges scaled; also return each producer's factors [O], else 1."""
        generator = torch.Generator().manual_seed(1)
        scales = {
            name: random_scales(self._replay.sources[name], generator)
            for name in dict.fromkeys(edge.producer for edge in edges)
        }
        factors = {name: torch.ones_like(scale) for name, scale in scales.items()}
        for edge in edges:
            factors[edge.producer][edge.rows] = scales[edge.producer][edge.rows]
        with self._replay.widening():
            return self._replay.record(self._noise, factors), factors

    def _scaled_alike(self, edges: Sequence[ScalePair]) -> list[bool]:
        """Return for each edge whether its consumers' inputs are scaled by the factors of the outputs."""
        if not edges:
            return []
        after, factors = self._scaled(edges)
        result: list[bool] = []
        for edge in edges:
            old, new = self._before.inputs(edge.consumers[0])[0], after.inputs(edge.consumers[0])[0]
            expected = old * edge.spread(factors[edge.producer][edge.rows].to(old.device))
            result.append(torch.allclose(new.float(), expected.float(), rtol=FACTOR_TOLERANCE, atol=0))
        return result

    def _other_readers(self, edges: Sequence[ScalePair]) -> list[str]:
        """Name the other readers that change when the outputs of all edges are scaled and the consumers' are not."""
        after, _ = self._scaled(edges)
        consumers = {name for edge in edges for name in edge.consumers}
        changed = [
            name
            for name in self.plain.outputs
            if name not in consumers and _differ(self._before.inputs(name), after.inputs(name))
        ]
        leaving = [[record.update, *record.beside, *record.routing] for record in (self._before, after)]
        return changed + (["the output of the block"] if _differ(*leaving) else [])

    def _divides(self, edge: ScalePair) -> bool:
        """Return whether folding divides the norm's output; the norm is called alone, with its input in the block."""
        (args, kwargs), norm = self.plain.arguments[edge.producer][0], self.block.get_submodule(edge.producer)
        scale_O = random_scales(shape_of(norm)[0], torch.Generator().manual_seed(0))
        with torch.no_grad(), widened(norm, ()):
            before = norm(*args, **kwargs)
            with divided(self.block, edge, scale_O[edge.rows]):
                after = norm(*args, **kwargs)
        factor_O = torch.ones_like(scale_O)
        factor_O[edge.rows] /= scale_O[edge.rows]
        expected = before.float() * factor_O.to(before.device)
        moved_O = (after.float() - expected).flatten(0, -2).norm(dim=0)
        return bool((moved_O <= NORM_TOLERANCE * expected.flatten(0, -2).norm(dim=0)).all())

    def _without_producer(self, reading: Reading) -> Rejected:
        if reading.candidates:
            return Rejected(reading.candidates[0].producer, reading.names, NO_PASSAGE)
        x = self.plain.inputs(reading.names[0])[0]
        for name, outputs in self.plain.weightless.items():
            if any(_is_norm_of(output, x) for output in outputs):
                return Rejected(name, reading.names, NO_WEIGHT)
        return Rejected(None, reading.names, NO_PRODUCER)


def _merged(edges: Sequence[ScalePair]) -> list[ScalePair]:
    """Merge the edges of layers that read the same outputs in the same order."""
    merged: dict[object, ScalePair] = {}
    for edge in edges:
        key = (edge.producer, edge.rows.numpy().tobytes(), edge.channels.numpy().tobytes())
        before = merged.get(key)
        merged[key] = replace(edge, consumers=(*before.consumers, *edge.consumers)) if before else edge
    return list(merged.values())


def _differ(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return any(
        old.shape != new.shape or relative_change(old, new) > UNTOUCHED for old, new in zip(before, after, strict=True)
    )


def _is_norm_of(output: Any, x: torch.Tensor) -> bool:
    """Return whether ``x`` is this output, and each of its tokens has a mean square of about 1."""
    if not isinstance(output, torch.Tensor) or output.shape[-1] != x.shape[-1] or output.numel() != x.numel():
        return False
    power = x.float().square().mean(-1)
    return torch.equal(output.reshape(x.shape), x) and bool(((power - 1).abs() < 0.05).all())
