"""One layer's decision, the type that planning, solving and exporting share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantcore.config import QSchemeType, QuantizationConfig, QuantizationSpec


@dataclass(frozen=True)
class LayerPlan:
    """A linear layer that will be quantized. ``block`` is its decoder block, None outside the blocks (lm_head)."""

    name: str
    block: int | None
    out_features: int
    in_features: int
    config: QuantizationConfig

    @property
    def weight(self) -> QuantizationSpec:
        assert self.config.weight is not None
        return self.config.weight

    @property
    def input_tensors(self) -> QuantizationSpec | None:
        return self.config.input_tensors

    @property
    def num_scales(self) -> tuple[int, int]:
        """Shape [rows, groups] of the weight's scales."""
        if self.weight.qscheme is QSchemeType.per_tensor:
            return (1, 1)
        if self.weight.qscheme is QSchemeType.per_channel:
            return (self.out_features, 1)
        return (self.out_features, self.in_features // self.group_size)

    @property
    def group_size(self) -> int:
        """Inputs that share one scale within a row."""
        size = self.weight.group_size
        return self.in_features if size is None or size == -1 else size

    @property
    def scheme(self) -> str:
        """A short name for people: ``uint4 per_group 64``, ``int8 per_channel + int8 per_token dynamic``."""
        weight = self.weight
        text = f"{weight.dtype.value} {weight.qscheme.value}"
        text += f" {self.group_size}" if weight.qscheme is QSchemeType.per_group else ""
        if self.input_tensors is not None:
            inputs = self.input_tensors
            granularity = "per_token" if inputs.qscheme is QSchemeType.per_channel else "per_tensor"
            text += f" + {inputs.dtype.value} {granularity} {'dynamic' if inputs.is_dynamic else 'static'}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "block": self.block,
            "shape": [self.out_features, self.in_features],
            "scheme": self.scheme,
        }
