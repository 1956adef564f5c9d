"""What every exporter can do: say whether it can hold a layer, write its tensors, read them back, describe itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quantcore.layer import LayerPlan
from quantcore.registry import Registry

if TYPE_CHECKING:
    import torch

    from quantcore.config import Config
    from quantcore.qtensor import QTensor


class Exporter(Protocol):
    """One on-disk format. Exporters keep no state: they map values to tensors and back."""

    name: str
    title: str

    def refuse(self, layer: LayerPlan) -> str | None:
        """Why this format cannot hold ``layer`` (a sentence), or None if it can."""

    def encode(self, layer: LayerPlan, weight: QTensor, input_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The tensors to store for ``layer``, by full name."""

    def decode(self, layer: LayerPlan, tensors: dict[str, torch.Tensor]) -> QTensor:
        """The weight that ``encode`` stored, rebuilt from the stored tensors alone."""

    def decode_input_scale(self, layer: LayerPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """The static scale of the layer's input, float32 scalar, or None."""

    def tensor_names(self, layer: LayerPlan) -> list[str]:
        """The names that ``encode`` writes for ``layer``."""

    def quantization_config(self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json. ``kept`` are full names of linear layers left as they were."""

    def load_hint(self, path: str) -> str:
        """Python lines that load the checkpoint at ``path`` in the format's main consumer."""


EXPORTERS: Registry[Exporter] = Registry("export_format", "quantcore.export")
