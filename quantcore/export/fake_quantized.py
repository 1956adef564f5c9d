"""An ordinary checkpoint whose weights went through quantize and dequantize: AMD Quark's ``fake_quantized``.

The tensors of the float model's checkpoint, by its names, in its dtypes and layouts: ``weight`` [out, in], but
[in, out] for GPT-2's Conv1D; experts stacked where they were. config.json does not mention it, so that every reader of
the float model reads this one, and any tool can measure the rounding error. Every spec and class of layer fits.
Activations are not included: their scales are not stored, and no reader rounds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config
from quantcore.export.exporter import EXPORTERS, Exporter, Tensors
from quantcore.export.readers import Readers
from quantcore.formats.weight_layout import stored, stored_shape

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer


class FakeQuantizedExporter:
    name = "fake_quantized"
    title = "the float model's own format with rounded weights (Transformers)"
    readers = Readers("Transformers", main_reads_all=True, in_transformers=True)

    def refuse(self, layer: LayerPlan) -> str | None:
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        return {"weight": TensorLayout(model_dtype, stored_shape(layer.shape, layer.kind))}

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        return {"weight": stored(quantized.weight.dequantize(), layer.kind)}

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any] | None:
        return None

    def load_hint(self, path: str) -> str:
        return f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained({path!r})"


_exporter: Exporter = EXPORTERS.add("fake_quantized")(FakeQuantizedExporter())
