"""Recovers the values that exporters store of a frozen layer: weight codes and calibrated ranges."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantcore.config.spec import RoundType
from quantcore.engine.modules.layers import QuantizedLayer
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.errors import ProofError
from quantcore.tensors.affine import QParams
from quantcore.tensors.qtensor import QLayer, quantize_weight


def encode_layer(layer: QuantizedLayer) -> QLayer:
    """Return the codes and ranges that an exporter stores of a frozen ``layer``, recovered exactly from the weight.

    Raises ProofError if the codes do not reproduce every bit of the weight.
    """
    assert layer.weight_quantizer is not None and layer.weight_quantizer.params is not None
    weight = layer.canonical_weight().detach()
    nearest = replace(layer.plan.weight, round_method=RoundType.half_even)  # the weight lies at a code, not between two
    quantized = quantize_weight(weight, layer.weight_quantizer.params, nearest)
    if not torch.equal(quantized.dequantize().to(weight.dtype), weight):
        raise ProofError(
            f"The codes of {layer.plan.name} do not reproduce its weight in {weight.dtype}.",
            code="proof_tensor_differs",
            hint="Formats of more than 8 bits need a float32 model, and a frozen model's weights must not be changed.",
        )
    return QLayer(quantized, learned_params(layer.input_quantizer), learned_params(layer.output_quantizer))


def learned_params(quantizer: TensorQuantizer | None) -> QParams | None:
    """Return the parameters of ``quantizer``; None if there is no quantizer, or its parameters are dynamic."""
    return None if quantizer is None else quantizer.params
