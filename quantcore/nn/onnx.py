"""A frozen model as ONNX: weights as codes behind DequantizeLinear, activations through QuantizeLinear and back.

ONNX (opset 21) has integers of 4, 8 and 16 bits and fp8, with one scale for a tensor, a channel, or a block along one
axis. Errors name the layers whose specs it does not have. Language models from files:
``quantcore.export.onnx.onnx_exporter``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quantcore.config.grouping import Grouping, weight_grouping
from quantcore.config.spec import QuantizationSpec
from quantcore.engine.containers.onnx_nodes import NARROW, OPSET, activation, check_installed, onnx_node
from quantcore.engine.modules.layers import QuantizedLayer, quantized_layers
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.errors import ConfigError
from quantcore.export.onnx.onnx_exporter import activation_fault, fault_of
from quantcore.nn.codes import encode_layer
from quantcore.nn.graph import export_program


def export_onnx(
    model: nn.Module,
    batch: Any,
    path: Path,
    *,
    opset_version: int = OPSET,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
) -> None:
    """Write the frozen ``model`` to ``path``. ``batch`` is an example of a call's inputs: see ``graph.trace``.

    ONNX Runtime computes in float32 and float16. A model in bfloat16 or float64 becomes a graph in float32, its inputs
    and outputs as well. Raises ConfigError for a spec without an ONNX node, for a model that computes in bfloat16
    regardless of its weights, or if the packages for ONNX are missing.
    """
    check_installed()
    if opset_version < OPSET:
        raise ConfigError(
            f"opset_version is {opset_version}; 4 bits, fp8 and blocks need {OPSET} or later.",
            code="invalid_config",
            hint="Remove it.",
            field="/opset_version",
        )
    for name, layer in quantized_layers(model):
        _check_layer(name, layer)
    for name, module in model.named_modules():
        _check_attention(name, module)
    with _traced_as_nodes(model), _in_float32(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about torch
        program = export_program(model, batch, _as_float32)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset_version,
            verbose=False,
            input_names=list(input_names) or None,
            output_names=list(output_names) or None,
        )
        assert exported is not None
        _narrow(exported.model)
        _check_dtypes(exported.model)
        exported.save(path)  # inside the block: its tensors are the model's until they are written


NOT_COMPUTED = (torch.bfloat16, torch.float64)
"""Number types for which ONNX Runtime has kernels of few operations only."""


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in NOT_COMPUTED else value


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Hold the weights of NOT_COMPUTED types in float32 inside the block; restore the original weights afterwards."""
    own = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in NOT_COMPUTED]
    try:
        for tensor, data in own:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def _check_dtypes(model: Any) -> None:
    """Raise ConfigError for a graph that does more in bfloat16 than round to it."""
    import onnx_ir

    for node in model.graph.all_nodes():
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        if node.op_type != "Cast" and any(value.dtype is onnx_ir.DataType.BFLOAT16 for value in values):
            raise ConfigError(
                f"The model's code computes in bfloat16 ({node.op_type}), which ONNX Runtime does not support.",
                code="incompatible_export",
                hint="Load the model in float32, and remove casts to bfloat16 from its code.",
            )


@contextmanager
def _traced_as_nodes(model: nn.Module) -> Iterator[None]:
    """Let quantizers trace as ONNX nodes and frozen weights as their codes, inside the block."""
    layers = [layer for _, layer in quantized_layers(model)]
    quantizers = [module for module in model.modules() if isinstance(module, TensorQuantizer)]
    own = {module: module.__dict__.get("forward") for module in (*quantizers, *layers)}  # Accelerate's, if any
    try:
        for quantizer in quantizers:
            nodes = _frozen_already if quantizer.is_weight else _activation_node
            quantizer.forward = partial(nodes, quantizer)  # type: ignore[method-assign]
        for layer in layers:
            if layer.plan.kind == "Conv1D":
                layer.forward = partial(_without_view, layer)  # type: ignore[method-assign]
            if layer.weight_quantizer is not None and layer.weight_quantizer.params is not None:
                attributes = _add_codes(layer)
                layer.weight_quantizer.forward = partial(_weight_node, layer, attributes)  # type: ignore[method-assign]
                layer.frozen = False  # so that its quantizer computes its weight
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


def _activation_node(quantizer: TensorQuantizer, x: torch.Tensor) -> torch.Tensor:
    return activation(x, quantizer.spec, quantizer.params)


def _without_view(layer: QuantizedLayer, x: torch.Tensor) -> torch.Tensor:
    """Compute the output of ``Conv1D`` without its reshape between DequantizeLinear and MatMul.

    That reshape makes ONNX Runtime's optimizer fail.
    """
    if layer.input_quantizer is not None:
        x = layer.input_quantizer(x)
    assert layer.weight is not None
    output = functional.linear(x, layer.weight.T, layer.bias)
    return output if layer.output_quantizer is None else layer.output_quantizer(output)


def _add_codes(layer: QuantizedLayer) -> dict[str, int]:
    """Give ``layer`` buffers for its codes, scales and zero points in ONNX's layout; returns the node's attributes."""
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
    """Return scales [R, G] of a tensor of ``shape`` in ONNX's layout, and the attributes that describe it.

    The layout is a scalar, one value a channel, or the shape of the tensor with one axis divided into blocks.
    Two-dimensional blocks become blocks along the rows, with each scale repeated for every row.
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
    return onnx_node("DequantizeLinear", inputs, attributes, layer.plan.weight, torch.float32).to(weight.dtype)


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


def _check_layer(name: str, layer: QuantizedLayer) -> None:
    config = layer.plan.config
    for field, spec in (("input_tensors", config.input_tensors), ("output_tensors", config.output_tensors)):
        _refuse(name, field, spec, fault_of(spec) or activation_fault(spec))
    _refuse(name, "weight", config.weight, fault_of(config.weight))


def _check_attention(name: str, module: nn.Module) -> None:
    for what in ("query", "key", "softmax"):
        quantizer = module._modules.get(f"{what}_quantizer")
        if isinstance(quantizer, TensorQuantizer):
            _refuse(name, what, quantizer.spec, fault_of(quantizer.spec) or activation_fault(quantizer.spec))


def _refuse(name: str, field: str, spec: QuantizationSpec | None, reason: str | None) -> None:
    if spec is not None and reason is not None:
        raise ConfigError(
            f"ONNX cannot store the {field} of {name} ({spec.dtype.value} {spec.qscheme.value}): {reason}.",
            code="incompatible_export",
            hint="Use another spec for this layer, or exclude it.",
            field=f"/{field}",
        )
