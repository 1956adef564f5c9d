"""A module that quantizes and dequantizes one tensor, so that its scales move with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from quantcore.config.grouping import weight_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.solvers.rtn import observed_ranges
from quantcore.tensors.affine import QParams, fake_quantize, fake_quantize_activation
from quantcore.tensors.double_quant import NestedScales
from quantcore.tensors.qtensor import quantize_weight


class TensorQuantizer(nn.Module):
    """Quantizes and dequantizes one tensor: an activation [..., T, I] or a weight [out, in, *kernel].

    ``scale``, ``zero_point``, ``global_scale`` and the parts of ``nested`` are buffers (None where params has none).
    They stay float32 even if the model is cast, because codes were chosen for exactly these numbers. Without ``params``
    the scales are computed for every tensor; a spec without scales (bfloat16) is a plain cast.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    global_scale: torch.Tensor | None
    nested_codes: torch.Tensor | None
    nested_absmax: torch.Tensor | None
    nested_offset: torch.Tensor | None

    def __init__(self, spec: QuantizationSpec, params: QParams | None, *, is_weight: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.is_weight = is_weight
        for name in ("scale", "zero_point", "global_scale"):
            self.register_buffer(name, None if params is None else getattr(params, name))
        nested = None if params is None else params.nested
        for name in ("codes", "absmax", "offset"):
            self.register_buffer(f"nested_{name}", None if nested is None else getattr(nested, name))

    @classmethod
    def of_weight(cls, weight: torch.Tensor, spec: QuantizationSpec, global_scale: torch.Tensor | None = None) -> Self:
        """Make the quantizer of a weight [out, in, *kernel] or a bias [out], with the range of its current values."""
        if not spec.format.scaled:
            return cls(spec, None, is_weight=True)
        return cls(spec, observed_ranges(weight, spec, global_scale), is_weight=True)

    @property
    def params(self) -> QParams | None:
        """The parameters in the buffers; None if the scales are computed for every tensor."""
        if self.scale is None:
            return None
        nested = None
        if self.nested_codes is not None and self.nested_absmax is not None and self.nested_offset is not None:
            nested = NestedScales(self.nested_codes, self.nested_absmax, self.nested_offset)
        return QParams(self.scale, self.zero_point, self.global_scale, nested)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after quantize and dequantize, in x's shape and dtype."""
        params = self.params
        if not self.spec.format.scaled:
            return self.spec.format.round(x.float()).to(x.dtype)
        if self.is_weight:
            assert params is not None
            return fake_quantize(x, self.spec, weight_grouping(self.spec), params)
        return fake_quantize_activation(x, self.spec, params)

    def through_codes(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the numbers of ``forward``, computed through codes, so that a zero has the sign of its code."""
        params = self.params
        if params is None:
            return self.forward(weight)
        return quantize_weight(weight, params, self.spec).dequantize().to(weight.dtype)

    def extra_repr(self) -> str:
        how = "dynamic" if self.spec.is_dynamic else "static"
        return f"{self.spec.dtype.value} {self.spec.qscheme.value} {how}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move with the model, but stay float32 when the model is cast (``.half()``)."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
