"""Measures the share of activations that static ranges clip, on text that calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from quantcore.calibration.ranges import Activations
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.numerics.affine import QParams


@dataclass
class Clipping:
    """Counts of clipped values and of all values, by watched tensor (``layer input``, ``layer output``).

    The first stay on the device until ``worst``, so that no window waits for it.
    """

    counts: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)

    @contextmanager
    def watching(
        self, modules: Mapping[LayerPlan, nn.Module], activations: Mapping[LayerPlan, Activations]
    ) -> Iterator[None]:
        """Count the inputs and outputs of the modules, before they are rounded, while this lasts."""
        handles = []
        for layer, module in modules.items():
            ranges = activations.get(layer, Activations()).on(module.get_parameter("weight").device)
            config = layer.config
            if ranges.inputs is not None and config.input_tensors is not None and config.input_tensors.is_static:
                see = self._see_input(f"{layer.name} input", config.input_tensors, ranges.inputs)
                handles.append(module.register_forward_pre_hook(see))
            if ranges.outputs is not None and config.output_tensors is not None and config.output_tensors.is_static:
                see = self._see_output(f"{layer.name} output", config.output_tensors, ranges.outputs)
                handles.append(module.register_forward_hook(see))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count(self, name: str, x: torch.Tensor, spec: QuantizationSpec, params: QParams) -> None:
        """Count values more than half a step beyond the range, which is that of the tensor or of each last index."""
        zero_point, step, low, high = params.zero_point_or_zeros, params.step, spec.format.min, spec.format.max
        ends = [((end - zero_point) * step).flatten() for end in (low - 0.5, high + 0.5)]
        if len(ends[0]) not in (1, x.shape[-1]):
            return  # static groups, which no consumer supports
        beyond = ((x < ends[0].to(x.dtype)) | (x > ends[1].to(x.dtype))).sum()
        before, total = self.counts.get(name, (torch.zeros_like(beyond), 0))
        self.counts[name] = (before + beyond, total + x.numel())

    def worst(self) -> tuple[str, float] | None:
        """Return the tensor with the largest clipped share, and that share; None if no range is static."""
        shares = {name: int(beyond) / max(1, total) for name, (beyond, total) in self.counts.items()}
        return max(shares.items(), key=lambda item: item[1]) if shares else None

    def by_kind(self) -> dict[str, float]:
        """Return the clipped share by kind of tensor (``q_proj input``), of all blocks and experts together."""
        counts: dict[str, tuple[int, int]] = {}
        for name, (beyond, total) in self.counts.items():
            kind = name.rpartition(".")[2]
            before, all_before = counts.get(kind, (0, 0))
            counts[kind] = (before + int(beyond), all_before + total)
        return {kind: beyond / max(1, total) for kind, (beyond, total) in counts.items()}

    def _see_input(self, name: str, spec: QuantizationSpec, params: QParams) -> Callable[..., None]:
        return lambda _, inputs: self.count(name, inputs[0], spec, params)

    def _see_output(self, name: str, spec: QuantizationSpec, params: QParams) -> Callable[..., None]:
        return lambda _, __, output: self.count(name, output, spec, params)
