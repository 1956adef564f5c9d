"""Activations as nodes of ONNX for torch.onnx to trace, rounded as the engine rounds them.

QuantizeLinear rounds half to even, and adds the zero point after that. Activations of fp8 and 4 bits are written as
arithmetic with a cast instead: ONNX Runtime 1.31 fuses their nodes into ones without a kernel, or drops a ReLU before
them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from quantcore.config.grouping import PER_TENSOR, activation_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.errors import ConfigError
from quantcore.tensors.affine import QParams, find_params

OPSET = 21
"""ONNX opset: the first with 4 bits, fp8 and blocks."""

WITH_NODES = ("int8", "uint8", "int16", "uint16")
"""Dtypes for which activations pass through QuantizeLinear."""

NARROW = "quantcore.narrow"
"""Metadata key of a node whose codes have 4 bits: torch has no such tensors, so they are traced as bytes."""


def check_installed() -> None:
    """Raise ConfigError that names the packages to install if one that ONNX export needs is missing."""
    missing = [name for name in ("onnx", "onnxscript", "ml_dtypes") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ONNX export needs the package(s) {', '.join(missing)}.",
            code="missing_package",
            hint="pip install 'bitfoundry[engine]'",
        )


def activation(x: torch.Tensor, spec: QuantizationSpec, params: QParams | None) -> torch.Tensor:
    """Return x after quantize and dequantize; without ``params`` the scales are computed from x.

    The nodes keep the shape of x if scales are per tensor or per feature; else they work on rows with one scale each.
    """
    if not spec.format.scaled:
        return x.to(getattr(torch, spec.format.storage)).to(x.dtype)
    grouping = activation_grouping(spec)
    x_RGS = grouping.split(x.float())
    if params is None:
        params = find_params(x_RGS.amin(-1), x_RGS.amax(-1), spec, torch.float32)
    if spec.dtype.value not in WITH_NODES:
        return grouping.join(_arithmetic(x_RGS, params, spec), tuple(x.shape)).to(x.dtype)
    is_one, is_rows = grouping == PER_TENSOR, grouping != PER_TENSOR and not grouping.across
    values = x_RGS.flatten(0, 1) if is_rows else x.float()
    attributes = {} if is_one else {"axis": 0 if is_rows else x.ndim - 1}
    storage = getattr(torch, spec.format.storage)
    scale = params.scale.reshape(() if is_one else -1)
    # Always with a zero point, whose type is the type of the codes. The attribute output_dtype would do, but ONNX
    # Runtime's optimizer turns int8 into uint8 by the zero point alone, and then finds that the two disagree.
    zero_point = params.zero_point_or_zeros
    inputs = [scale, zero_point.to(storage).reshape(scale.shape)]
    codes = onnx_node("QuantizeLinear", [values, *inputs], attributes, spec, storage)
    values = onnx_node("DequantizeLinear", [codes, *inputs], attributes, spec, torch.float32)
    return (grouping.join(values.view(x_RGS.shape), tuple(x.shape)) if is_rows else values).to(x.dtype)


def onnx_node(
    name: str, inputs: list[Any], attributes: dict[str, int], spec: QuantizationSpec, dtype: torch.dtype
) -> torch.Tensor:
    """Return the output of a new ONNX node, in the shape of its first input."""
    output: torch.Tensor = torch.onnx.ops.symbolic(
        name,
        inputs,
        dict(attributes),
        dtype=dtype,
        shape=inputs[0].shape,
        metadata_props={NARROW: "4"} if spec.format.bits == 4 else None,
    )
    return output


def _arithmetic(x_RGS: torch.Tensor, params: QParams, spec: QuantizationSpec) -> torch.Tensor:
    """Quantize and dequantize in operations that ONNX has for floats."""
    fmt = spec.format
    zero_point = 0 if params.zero_point is None else params.zero_point.unsqueeze(-1)
    x = x_RGS / params.scale.unsqueeze(-1) + zero_point
    if fmt.zero_point_ok:
        x = x.round().clamp(fmt.min, fmt.max) - zero_point
    else:
        x = x.clamp(fmt.min, fmt.max).to(getattr(torch, fmt.storage)).float()
    return x * params.scale.unsqueeze(-1)
