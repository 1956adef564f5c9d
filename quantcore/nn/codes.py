"""Recovers what exporters store of a frozen layer: the codes of its weight, and what calibration learned."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantcore.config.spec import RoundType
from quantcore.errors import ProofError
from quantcore.nn.layers import QuantizedLayer
from quantcore.nn.tensor_quantizer import TensorQuantizer
from quantcore.numerics.affine import QParams
from quantcore.numerics.qtensor import QLayer, quantize_weight


def encode_layer(layer: QuantizedLayer) -> QLayer:
    """Return what an exporter stores of a frozen ``layer``: the codes are recovered from the weight, exactly.

    Raises ProofError if they do not give back every bit of the weight.
    """
    assert layer.weight_quantizer is not None and layer.weight_quantizer.params is not None
    weight = layer.canonical_weight().detach()
    nearest = replace(layer.plan.weight, round_method=RoundType.half_even)  # the weight lies beside a code, not between
    quantized = quantize_weight(weight, layer.weight_quantizer.params, nearest)
    if not torch.equal(quantized.dequantize().to(weight.dtype), weight):
        raise ProofError(
            f"The codes of {layer.plan.name} do not give back its weight in {weight.dtype}.",
            code="proof_tensor_differs",
            hint="Formats of more than 8 bits need a float32 model, and a frozen model's weights must not be changed.",
        )
    return QLayer(quantized, learned_params(layer.input_quantizer), learned_params(layer.output_quantizer))


def learned_params(quantizer: TensorQuantizer | None) -> QParams | None:
    """Return what ``quantizer`` learned; None if there is no quantizer, or nothing to learn."""
    return None if quantizer is None else quantizer.params
