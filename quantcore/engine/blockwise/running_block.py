"""The hidden states in front of a decoder block, and the block that runs on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from quantcore.engine.blockwise.backward import StateGradients, back_through
from quantcore.engine.calibration.collector import StatsCollector
from quantcore.engine.calibration.expert_token_topup import TokenTopup
from quantcore.engine.calibration.reduction import Span
from quantcore.engine.runtime.hidden import Hidden


@dataclass
class CalibrationStreams:
    """Hidden states in front of a block from which the algorithms learn.

    ``calibration``: the states for statistics; None if nothing is learned from data. With ``through_quantized`` they
    have come through the quantized blocks, else through the float ones. ``reference``: the same windows through the
    float blocks, where an algorithm compares the two; ``gradients`` are those of log p(y) by these states. ``probe``:
    one short window for proving edges. This rank has the calibration windows of ``span``; the probe is the same on all
    ranks.
    """

    calibration: Hidden | None
    span: Span = field(default_factory=lambda: Span(0))
    probe: Hidden | None = None
    reference: Hidden | None = None
    gradients: StateGradients | None = None
    through_quantized: bool = False


@dataclass(frozen=True)
class RunningBlock:
    """A loaded block, its number, and the streams in front of it."""

    block: nn.Module
    index: int
    streams: CalibrationStreams

    @property
    def calibration(self) -> Hidden:
        assert self.streams.calibration is not None
        return self.streams.calibration

    def run(self, *, collector: StatsCollector | None = None, advance: bool = False) -> None:
        """Run every calibration window through the unchanged block; ``advance`` keeps the outputs as the new states.

        With a ``collector`` each window of the reference runs before the same calibration window. At the end, experts
        that saw few tokens run on some of the others' tokens.
        """
        reference, lender = self.streams.reference, TokenTopup(self.block, self.streams.span)
        with torch.no_grad(), lender.watching():
            for window in range(len(self.calibration.states)):
                tokens_NTH = self.calibration.states[window].flatten(2)
                lender.begin(tokens_NTH)
                if collector is not None:
                    collector.begin(tokens_NTH)
                if collector is not None and reference is not None:
                    with collector.reference(), lender.paused():
                        reference.states[window] = self._run_reference(reference, window, collector)
                output = self.output(window)
                if advance:
                    self.calibration.states[window] = output
            if collector is not None and reference is not None:
                reference.run_idle(self.block, self.index)
            self.calibration.run_idle(self.block, self.index)
            lender.lend()

    def output(self, window: int) -> torch.Tensor:
        """Return the block's output for one calibration window, with gradients if they are enabled."""
        return self.calibration.run(self.block, self.index, window)

    def _run_reference(self, reference: Hidden, window: int, collector: StatsCollector) -> torch.Tensor:
        """Return the float block's output for a window of the reference; the collector gets its gradients, if any."""
        gradients = self.streams.gradients
        if gradients is None:
            return reference.run(self.block, self.index, window)
        state, behind = reference.states[window].clone(), gradients.behind(self.index, window)
        back = back_through(reference, state, self.block, self.index, window, collector.modules, behind)
        collector.learn([(call.name, call.inputs, call.gradient) for call in back.calls])
        return back.output

    @property
    def probe(self) -> Hidden:
        assert self.streams.probe is not None
        return self.streams.probe

    def output_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return the block's output for other hidden states of the probe's shape."""
        return self.probe.run_on(state, self.block, self.index, 0)

    def update(self) -> torch.Tensor:
        """Return what the block adds to the probe."""
        with torch.no_grad():
            return self.output_of(self.probe.states[0]) - self.probe.states[0]

    def advance_quantized(self) -> None:
        """Take the calibration windows through this block, quantized by now, if they go through quantized blocks."""
        if self.streams.calibration is not None and self.streams.through_quantized:
            self.run(advance=True)
