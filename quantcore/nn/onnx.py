"""A frozen model as ONNX: weights as codes behind DequantizeLinear, activations through QuantizeLinear and back.

ONNX (opset 21) has integers of 4, 8 and 16 bits and fp8, with one scale for a tensor, a channel, or a block along one
axis. Its QuantizeLinear rounds half to even, and adds the zero point after that. What it cannot say is refused by name.
Activations of fp8 and 4 bits are written as arithmetic with a cast instead: ONNX Runtime 1.31 fuses their nodes with
others into what it has no kernel for, or drops a ReLU before them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quantcore.affine import QParams, find_params
from quantcore.errors import ConfigError
from quantcore.grouping import PER_TENSOR, Grouping, activation_grouping, weight_grouping
from quantcore.nn.codes import encode_layer
from quantcore.nn.graph import export_program
from quantcore.nn.layers import QuantizedLayer, quantized_layers
from quantcore.nn.tensor_quantizer import TensorQuantizer
from quantcore.spec import QuantizationSpec, RoundType, ScaleType, ZeroPointType

OPSET = 21
ELEMENT_TYPES = {
    "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "fp8_e4m3": 17, "fp8_e4m3fnuz": 18, "fp8_e5m2": 19, "uint4": 21,
    "int4": 22,
}  # fmt: skip
"""Our names -> ONNX's numbers for its element types."""

WITH_NODES = ("int8", "uint8", "int16", "uint16")
"""What activations are sent through QuantizeLinear for."""

NARROW = "quantcore.narrow"
"""Marks a node, in its metadata, whose codes have 4 bits: torch has no such tensors, so they are traced as bytes."""


def export_onnx(
    model: nn.Module, batch: Any, path: Path, *,
    opset_version: int = OPSET, input_names: Sequence[str] = (), output_names: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the frozen ``model`` to ``path``. ``batch`` is an example of what it is called with: see ``graph.trace``.

    Raises ConfigError for a spec without an ONNX node, or if the packages for ONNX are not there.
    """
    _check_installed()
    if opset_version < OPSET:
        raise ConfigError(
            f"opset_version is {opset_version}; 4 bits, fp8 and blocks need {OPSET} or later.",
            code="invalid_config",
            hint="Leave it out.",
            field="/opset_version",
        )
    for name, layer in quantized_layers(model):
        _check_layer(name, layer)
    for name, module in model.named_modules():
        _check_attention(name, module)
    with _traced_as_nodes(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about torch
        program = export_program(model, batch)
        exported = torch.onnx.export(
            program, dynamo=True, opset_version=opset_version, verbose=False,
            input_names=list(input_names) or None, output_names=list(output_names) or None,
        )  # fmt: skip
    assert exported is not None
    _narrow(exported.model)
    exported.save(path)


@contextmanager
def _traced_as_nodes(model: nn.Module) -> Iterator[None]:
    """While this lasts, quantizers trace as the nodes of ONNX, and frozen weights as their codes."""
    layers = [layer for _, layer in quantized_layers(model)]
    quantizers = [module for module in model.modules() if isinstance(module, TensorQuantizer)]
    own = {module: module.__dict__.get("forward") for module in (*quantizers, *layers)}  # Accelerate's, if any
    try:
        for quantizer in quantizers:
            nodes = _frozen_already if quantizer.is_weight else _activation_nodes
            quantizer.forward = partial(nodes, quantizer)  # type: ignore[method-assign]
        for layer in layers:
            if layer.plan.kind == "Conv1D":
                layer.forward = partial(_without_view, layer)  # type: ignore[method-assign]
            if layer.weight_quantizer is not None and layer.weight_quantizer.params is not None:
                attributes = _add_codes(layer)
                layer.weight_quantizer.forward = partial(_weight_node, layer, attributes)  # type: ignore[method-assign]
                layer.frozen = False  # so that its weight comes out of its quantizer
        yield
    finally:
        for module, forward in own.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        for layer in layers:
            layer.frozen = True
            for name in ("weight_codes", "weight_scale", "weight_zero_point"):
                if name in layer._buffers:
                    delattr(layer, name)


def _frozen_already(_: TensorQuantizer, value: torch.Tensor) -> torch.Tensor:
    return value


def _without_view(layer: QuantizedLayer, x: torch.Tensor) -> torch.Tensor:
    """What ``Conv1D`` computes. Its reshape between DequantizeLinear and MatMul makes ONNX Runtime's optimizer fail."""
    if layer.input_quantizer is not None:
        x = layer.input_quantizer(x)
    assert layer.weight is not None
    output = functional.linear(x, layer.weight.T, layer.bias)
    return output if layer.output_quantizer is None else layer.output_quantizer(output)


def _add_codes(layer: QuantizedLayer) -> dict[str, int]:
    """Give ``layer`` buffers for its codes, scales and zero points as ONNX arranges them; the node's attributes."""
    weight = encode_layer(layer).weight
    shape = tuple(weight.codes.shape)
    grouping = weight_grouping(layer.plan.weight)
    scale, attributes = _arranged(weight.params.scale, grouping, shape)
    layer.register_buffer("weight_codes", weight.codes.contiguous(), persistent=False)
    layer.register_buffer("weight_scale", scale, persistent=False)
    if weight.params.zero_point is not None:
        zero_point, _ = _arranged(weight.params.zero_point.to(weight.codes.dtype), grouping, shape)
        layer.register_buffer("weight_zero_point", zero_point, persistent=False)
    return attributes


def _arranged(
    values_RG: torch.Tensor, grouping: Grouping, shape: tuple[int, ...]
) -> tuple[torch.Tensor, dict[str, int]]:
    """Scales [R, G] of a tensor of ``shape`` as ONNX wants them, and the attributes that say so.

    A scalar; one a channel; or the shape of the tensor with one axis cut into blocks. Two-dimensional blocks become
    blocks along the rows, each scale once for every row.
    """
    if grouping.block is not None:
        height, width = grouping.block
        return values_RG.repeat_interleave(height, 0)[: shape[0]].contiguous(), {"axis": 1, "block_size": width}
    if grouping.axis is None:
        return values_RG.reshape(()), {}
    if grouping.across:
        return values_RG.reshape(-1), {"axis": grouping.axis}
    others = list(shape)
    length = others.pop(grouping.axis)
    blocks = values_RG.reshape(*others, -1).movedim(-1, grouping.axis).contiguous()
    return blocks, {"axis": grouping.axis, "block_size": length // values_RG.shape[1]}


def _weight_node(layer: QuantizedLayer, attributes: dict[str, int], weight: torch.Tensor) -> torch.Tensor:
    names = ("weight_codes", "weight_scale", "weight_zero_point")
    inputs = [layer._buffers[name] for name in names if name in layer._buffers]
    return _node("DequantizeLinear", inputs, attributes, layer.plan.weight, torch.float32).to(weight.dtype)


def _activation_nodes(quantizer: TensorQuantizer, x: torch.Tensor) -> torch.Tensor:
    """x in its own shape where one scale a tensor or feature allows it, else as rows that have one scale each."""
    spec, params = quantizer.spec, quantizer.params
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
    # Always with a zero point, whose type says what the codes are. The attribute output_dtype would do, but ONNX
    # Runtime's optimizer turns int8 into uint8 by the zero point alone, and then finds that the two disagree.
    zero_point = params.zero_point_or_zeros
    inputs = [scale, zero_point.to(storage).reshape(scale.shape)]
    codes = _node("QuantizeLinear", [values, *inputs], attributes, spec, storage)
    values = _node("DequantizeLinear", [codes, *inputs], attributes, spec, torch.float32)
    return (grouping.join(values.view(x_RGS.shape), tuple(x.shape)) if is_rows else values).to(x.dtype)


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


def _node(
    name: str, inputs: list[Any], attributes: dict[str, int], spec: QuantizationSpec, dtype: torch.dtype
) -> torch.Tensor:
    made: torch.Tensor = torch.onnx.ops.symbolic(
        name, inputs, dict(attributes), dtype=dtype, shape=inputs[0].shape,
        metadata_props={NARROW: "4"} if spec.format.bits == 4 else None,
    )  # fmt: skip
    return made


def _narrow(model: Any) -> None:
    """Turn the bytes of 4-bit codes and zero points into ONNX's own 4-bit tensors."""
    import ml_dtypes
    import onnx_ir

    narrow = {onnx_ir.DataType.INT8: ml_dtypes.int4, onnx_ir.DataType.UINT8: ml_dtypes.uint4}
    made: dict[str, Any] = {}
    for node in model.graph.all_nodes():
        for index, value in enumerate(node.inputs if NARROW in node.metadata_props else ()):
            if value is None or value.const_value is None or value.dtype not in narrow:
                continue
            if value.name not in made:
                tensor = onnx_ir.Tensor(
                    value.const_value.numpy().astype(narrow[value.dtype]), name=f"{value.name}_4bit"
                )
                made[value.name] = onnx_ir.Value(
                    name=tensor.name, const_value=tensor, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype)
                )
                model.graph.register_initializer(made[value.name])
            node.replace_input_with(index, made[value.name])
            if not value.uses():
                del model.graph.initializers[value.name]


def _check_installed() -> None:
    missing = [name for name in ("onnx", "onnxscript", "ml_dtypes") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ONNX export needs the package(s) {', '.join(missing)}.",
            code="missing_package",
            hint="pip install 'bitfoundry[engine]'",
        )


def _check_layer(name: str, layer: QuantizedLayer) -> None:
    config = layer.plan.config
    for field, spec in (("input_tensors", config.input_tensors), ("output_tensors", config.output_tensors)):
        _refuse(name, field, spec, _common_fault(spec) or _activation_fault(spec))
    _refuse(name, "weight", config.weight, _common_fault(config.weight))


def _check_attention(name: str, module: nn.Module) -> None:
    for what in ("query", "key", "softmax"):
        quantizer = module._modules.get(f"{what}_quantizer")
        if isinstance(quantizer, TensorQuantizer):
            _refuse(name, what, quantizer.spec, _common_fault(quantizer.spec) or _activation_fault(quantizer.spec))


def _common_fault(spec: QuantizationSpec | None) -> str | None:
    if spec is None or not spec.format.scaled:
        return None
    if spec.dtype.value not in ELEMENT_TYPES:
        return f"its element types are {', '.join(ELEMENT_TYPES)}"
    if spec.over is not None or spec.scale_type is ScaleType.e4m3:
        return "it has one scale for a value, not two"
    if spec.zero_point_type is ZeroPointType.float32:
        return "its zero points are codes: zero_point_type int32"
    return None


def _activation_fault(spec: QuantizationSpec | None) -> str | None:
    if spec is None or not spec.format.scaled:
        return None
    if spec.round_method is not RoundType.half_even and spec.format.zero_point_ok:
        return "it rounds half to even"
    if spec.outlier_threshold is not None:
        return "it cannot leave features out while it runs"
    if spec.is_dynamic and spec.scale_type in (ScaleType.e8m0, ScaleType.pof2):
        return "it cannot find powers of two while it runs"
    return None


def _refuse(name: str, field: str, spec: QuantizationSpec | None, reason: str | None) -> None:
    if spec is not None and reason is not None:
        raise ConfigError(
            f"ONNX cannot hold the {field} of {name} ({spec.dtype.value} {spec.qscheme.value}): {reason}.",
            code="incompatible_export",
            hint="Take another spec for this layer, or exclude it.",
            field=f"/{field}",
        )
