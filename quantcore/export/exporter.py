"""What every exporter can do: say whether it can hold a layer, write its tensors, read them back, describe itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config import Config, QuantizationSpec, ScaleType
from quantcore.layer import LayerPlan
from quantcore.registry import Registry

if TYPE_CHECKING:
    import torch

    from quantcore.qtensor import QParams, QTensor

Tensors = dict[str, "torch.Tensor"]


class Exporter(Protocol):
    """One on-disk format. Exporters keep no state: they map values to tensors and back.

    ``encode`` and ``decode`` speak of one layer's tensors by their last name (``weight_scale``), without the layer's.
    """

    name: str
    title: str

    def refuse(self, layer: LayerPlan) -> str | None:
        """Why this format (or its consumer) cannot hold ``layer``, as the end of a sentence; None if it can."""

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        """The tensors that ``encode`` will give for ``layer``; ``model_dtype`` as in safetensors (``BF16``)."""

    def encode(self, layer: LayerPlan, weight: QTensor, inputs: QParams | None) -> Tensors:
        """The tensors to store. ``inputs`` are the static parameters of the layer's input, scalars, or None."""

    def decode(self, layer: LayerPlan, tensors: Tensors) -> tuple[QTensor, QParams | None]:
        """What ``encode`` was given, rebuilt from the stored tensors alone."""

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        """The ``quantization_config`` of config.json. ``kept`` are full names of linear layers left as they were."""

    def load_hint(self, path: str) -> str:
        """Python lines that load the checkpoint at ``path`` in the format's main consumer."""


EXPORTERS: Registry[Exporter] = Registry("export_format", "quantcore.export")

_SCALE_DTYPES = {ScaleType.float32: "F32", ScaleType.float16: "F16", ScaleType.bfloat16: "BF16"}


def stored_scale_dtype(spec: QuantizationSpec, model_dtype: str) -> str:
    """The safetensors dtype of the scales of ``spec`` in a model of ``model_dtype``."""
    return _SCALE_DTYPES.get(spec.scale_type, model_dtype)
