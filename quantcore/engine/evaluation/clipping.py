"""Measures the share of activations that static ranges clip, on text not used for calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.model.cache_taps import Through, tap_caches
from quantcore.tensors.affine import QParams


@dataclass
class Clipping:
    """Counts of clipped values and of all values, by watched tensor (``layer input``, ``output`` or ``cache``).

    The first stay on the device until ``worst``, so that no window waits for it. ``squares`` are, for each watched
    cache, the sums of squares of what is cut off and of all values.
    """

    counts: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def watching(
        self, modules: Mapping[LayerPlan, nn.Module], activations: Mapping[LayerPlan, Activations], within: nn.Module
    ) -> Iterator[None]:
        """Count the inputs and outputs of the modules, before they are rounded, while this lasts.

        Of keys and values it counts what enters the cache. ``within`` holds the modules and the attention around them.
        """
        handles: list[RemovableHandle] = []
        cached: dict[LayerPlan, Through] = {}
        for layer, module in modules.items():
            ranges = activations.get(layer, Activations()).on(module.get_parameter("weight").device)
            config = layer.config
            if ranges.inputs is not None and config.input_tensors is not None and config.input_tensors.is_static:
                see = self._see_input(f"{layer.name} input", config.input_tensors, ranges.inputs)
                handles.append(module.register_forward_pre_hook(see))
            if ranges.outputs is not None and config.output_tensors is not None and config.output_tensors.is_static:
                if layer.is_cached:
                    cached[layer] = self._see_cached(f"{layer.name} cache", config.output_tensors, ranges.outputs)
                else:
                    see = self._see_output(f"{layer.name} output", config.output_tensors, ranges.outputs)
                    handles.append(module.register_forward_hook(see))
        handles += tap_caches(modules, within, cached.get)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count(self, name: str, x: torch.Tensor, spec: QuantizationSpec, params: QParams) -> None:
        """Count values more than half a step beyond the range, which is that of the tensor or of each last index."""
        low, high = _ends(spec, params, x.dtype)
        if len(low) not in (1, x.shape[-1]):
            return  # static groups, which no consumer supports
        beyond = ((x < low) | (x > high)).sum()
        before, total = self.counts.get(name, (torch.zeros_like(beyond), 0))
        self.counts[name] = (before + beyond, total + x.numel())

    def worst(self) -> tuple[str, float] | None:
        """Return the tensor with the largest clipped share, and that share; None if no range is static."""
        shares = {name: int(beyond) / max(1, total) for name, (beyond, total) in self.counts.items()}
        return max(shares.items(), key=lambda item: item[1]) if shares else None

    def worst_cache(self) -> tuple[str, float] | None:
        """Return the cache that loses most, and the norm of what is cut off over that of all values; None without."""
        shares = {name: float((lost / total.clamp(min=1e-30)).sqrt()) for name, (lost, total) in self.squares.items()}
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

    def _see_cached(self, name: str, spec: QuantizationSpec, params: QParams) -> Through:
        def see(x: torch.Tensor) -> torch.Tensor:
            self.count(name, x, spec, params)
            values, (low, high) = x.float(), _ends(spec, params, torch.float32)
            squares = torch.stack([(values - values.clamp(low, high)).square().sum(), values.square().sum()])
            self.squares[name] = self.squares[name] + squares if name in self.squares else squares
            return x

        return see

    def _see_output(self, name: str, spec: QuantizationSpec, params: QParams) -> Callable[..., None]:
        return lambda _, __, output: self.count(name, output, spec, params)


def _ends(spec: QuantizationSpec, params: QParams, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the range ends below and above, half a step beyond its last codes."""
    zero_point, step = params.zero_point_or_zeros, params.step
    low, high = (((end - zero_point) * step).flatten() for end in (spec.format.min - 0.5, spec.format.max + 0.5))
    return low.to(dtype), high.to(dtype)
