"""A language model as an ONNX graph with a key-value cache, traced without a weight in memory.

Transformers' own model runs on tensors that have shapes but no values, so there is no table of architectures. Quantized
layers run as nodes of ONNX (``com.microsoft.MatMulNBits`` for 4 bits) on tensors with the export's names and shapes.
The graph computes in float32, as ONNX Runtime does on a CPU. Inputs and outputs have the names that Optimum gives them.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from transformers import DynamicCache, PreTrainedModel

from quantcore.checkpoint.layout import TensorLayout
from quantcore.checkpoint.onnx_headers import PARTS
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import QSchemeType, QuantizationSpec
from quantcore.engine.containers.onnx_nodes import OPSET, activation
from quantcore.engine.model.cache_taps import Through, tap_caches
from quantcore.engine.model.parameter_names import place_tensors, untie_stored
from quantcore.engine.model.skeleton import build_skeleton, set_parameter
from quantcore.errors import ModelError
from quantcore.tensors.affine import QParams
from quantcore.tensors.source import TORCH_DTYPES

BATCH, TOKENS, PAST, ALL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
EXAMPLE = {BATCH: 2, TOKENS: 3, PAST: 5, ALL: 8}
"""Sizes to trace with. None of them is 0 or 1, which torch.export would treat as constants."""


@dataclass(frozen=True)
class Traced:
    """A traced graph.

    ``model`` (onnx_ir) is without its tensors, which are inputs of the graph; ``weights`` has these by the checkpoint's
    names.
    """

    model: Any
    weights: dict[str, Any]


def trace(
    model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout], layers: tuple[LayerPlan, ...]
) -> Traced:
    """Return the graph of the model with this config.json and quantized ``layers``.

    ``layouts`` are the export's tensors. Raises ModelError for a model that has no such graph, or that the tensors do
    not fit.
    """
    skeleton = build_skeleton(dict(model_config), torch.float32)
    skeleton.set_attn_implementation("eager")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    names = _fill(skeleton, layouts, layers, fake)
    model = _Cached(skeleton)
    with warnings.catch_warnings(), _quiet(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's and onnxscript's, about themselves
        program = _export(model, _example(skeleton, model, fake))
        exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, optimize=False)
        assert exported is not None
        graph = exported.model.graph
        weights: dict[str, Any] = {}
        for name in [name for name in graph.initializers if name in names]:
            _to_input(graph, graph.initializers[name], names[name], weights)
        _simplify(exported.model)
    _name_ends(graph, len(weights), model.takes_positions)
    return Traced(exported.model, weights)


class _Cached(nn.Module):
    """A language model as ONNX Runtime calls it: the cache goes in and out as plain tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        # Without a config every layer keeps all tokens; the mask excludes those outside a sliding window.
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        positions = {"position_ids": position_ids} if self.takes_positions else {}
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions
        )
        return output.logits, *_flat(output.past_key_values)


def _flat(cache: Any) -> list[torch.Tensor]:
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def _fill(
    model: PreTrainedModel, layouts: Mapping[str, TensorLayout], layers: tuple[LayerPlan, ...], fake: FakeTensorMode
) -> dict[str, str]:
    """Give ``model`` tensors without values, and ``layers`` their forward.

    Returns the export's names of the tensors, by the names that the trace gives them.
    """
    parts = {f"{layer.name}.{part}" for layer in layers for part in PARTS}
    floats = [name for name in layouts if name not in parts]
    placed = place_tensors(model, [*floats, *(f"{layer.name}.weight" for layer in layers)])
    homeless = [name for name in (*floats, *(f"{layer.name}.weight" for layer in layers)) if name not in placed]
    if homeless:
        raise _does_not_fit(f"the model has no parameter for '{homeless[0]}'")
    untie_stored(model, placed.values())
    state = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}  # of tensors without values, by their id
    for name in floats:
        before = state[placed[name]]
        empty = _fake(before.shape, before.dtype, fake)
        set_parameter(model, placed[name], empty)
        path, _, last = placed[name].rpartition(".")
        names[id(getattr(model.get_submodule(path), last))] = name
    modules = {layer: model.get_submodule(placed[f"{layer.name}.weight"].rpartition(".")[0]) for layer in layers}
    for layer, module in modules.items():
        module.register_parameter("weight", None)
        for part in PARTS:
            if (layout := layouts.get(f"{layer.name}.{part}")) is not None:
                empty = _fake(layout.shape, TORCH_DTYPES[layout.dtype], fake)
                module.register_buffer(part, empty)
                names[id(empty)] = f"{layer.name}.{part}"
        module.forward = partial(_quantized, module, layer)
    list(tap_caches(modules, model, lambda layer: _cached(modules[layer], layer)))
    model.tie_weights(recompute_mapping=False)
    lost = [name for name, tensor in _tensors(model).items() if tensor.is_meta]
    if lost:
        raise _does_not_fit(f"the checkpoint has no tensor for '{lost[0]}'")
    return {f"model.{place}": names[id(tensor)] for place, tensor in _tensors(model).items() if id(tensor) in names}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers; a tied tensor appears under both names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _fake(shape: tuple[int, ...], dtype: torch.dtype, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        return torch.empty(shape, dtype=dtype)


def _quantized(module: nn.Module, layer: LayerPlan, x: torch.Tensor) -> torch.Tensor:
    """Compute a quantized linear layer with ONNX nodes."""
    if layer.input_tensors is not None:
        x = activation(x, layer.input_tensors, _params(module, "input", layer.input_tensors))
    names = ("weight_codes", "weight_scale", "weight_zero_point")
    parts = [module.get_buffer(name) for name in names if name in module._buffers]
    if layer.weight.format.bits == 4:
        sizes = {"K": layer.in_features, "N": layer.out_features}
        attributes: dict[str, Any] = {**sizes, "bits": 4, "block_size": layer.group_size}
        shape = (*x.shape[:-1], layer.out_features)
        output = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits", [x, *parts], attributes, dtype=torch.float32, shape=shape, version=1
        )
    else:
        # [in, out] without a Transpose: otherwise ONNX Runtime does not fuse DequantizeLinear with the MatMul.
        axes: dict[QSchemeType, dict[str, Any]] = {
            QSchemeType.per_tensor: {},
            QSchemeType.per_channel: {"axis": 1},
            QSchemeType.per_group: {"axis": 0, "block_size": layer.group_size},
        }
        weight = torch.onnx.ops.symbolic(
            "DequantizeLinear", parts, axes[layer.weight.qscheme], dtype=torch.float32, shape=parts[0].shape
        )
        output = x @ weight
    bias = module._parameters.get("bias")
    if bias is not None:
        output = output + bias
    spec = layer.config.output_tensors
    if spec is None or layer.is_cached:  # what a cache holds is rounded where it enters the cache
        return output
    return activation(output, spec, _params(module, "output", spec))


def _cached(module: nn.Module, layer: LayerPlan) -> Through:
    """Return the nodes through which keys or values go before they enter the cache."""
    spec = layer.config.output_tensors
    assert spec is not None
    return lambda x: activation(x, spec, _params(module, "output", spec))


def _params(module: nn.Module, what: str, spec: QuantizationSpec) -> QParams | None:
    if not spec.is_static:
        return None
    return QParams(module.get_buffer(f"{what}_scale"), module._buffers.get(f"{what}_zero_point"))


def _example(skeleton: PreTrainedModel, model: _Cached, fake: FakeTensorMode) -> tuple[Any, ...]:
    """Return example arguments of ``model``; the shapes of the cache are those that the model itself makes."""
    with fake:
        ids = torch.zeros(EXAMPLE[BATCH], EXAMPLE[TOKENS], dtype=torch.int64)
        mask = torch.ones(EXAMPLE[BATCH], EXAMPLE[ALL], dtype=torch.int64)
        cache = getattr(_run(skeleton, ids), "past_key_values", None)
        try:
            shapes = [part.shape for part in _flat(cache)]
        except (AttributeError, TypeError) as error:
            raise _has_no_graph(f"it does not use a key-value cache: {type(cache).__name__}") from error
        past = [torch.zeros(shape[0], shape[1], EXAMPLE[PAST], shape[3]) for shape in shapes]
    return ids, mask, ids.clone(), past


def _run(skeleton: PreTrainedModel, ids: torch.Tensor) -> Any:
    try:
        return skeleton(input_ids=ids, use_cache=True)
    except Exception as error:  # models raise various errors on tensors without values
        raise _has_no_graph(str(error)) from error


def _export(model: _Cached, arguments: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """Return the program for a batch, sequence and cache of any size."""
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    sizes = (free, free, free, [{0: Dim.AUTO, 2: Dim.AUTO}] * len(arguments[3]))
    try:
        return torch.export.export(model, arguments, dynamic_shapes=sizes)
    except Exception as error:  # torch.export passes on all errors of the model
        raise _has_no_graph(str(error)) from error


def _to_input(graph: Any, value: Any, name: str, weights: dict[str, Any]) -> None:
    """Make an initializer an input of the graph, named as in the files, so that no pass uses its content.

    A tied tensor becomes one input.
    """
    del graph.initializers[value.name]
    value.const_value = None
    if name in weights:
        value.replace_all_uses_with(weights[name])
        return
    value.name = name
    graph.inputs.append(value)
    weights[name] = value


def _simplify(model: Any) -> None:
    """Fold known sizes and constants, and remove what is unused then.

    The patterns of onnxscript's optimizer are not used: their search takes minutes, and ONNX Runtime has its own.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    common.InlinePass()(model)
    optimizer.fold_constants(model)
    for simplify in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
    ):
        simplify(model)


def _name_ends(graph: Any, num_weights: int, takes_positions: bool) -> None:
    """Name the inputs and outputs of the graph and their axes.

    Inner values get no shapes, because readers infer them, and no metadata, where torch stores source lines with paths.
    """
    import onnx_ir

    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            value.shape = None
    ends = list(graph.inputs)[: len(graph.inputs) - num_weights]
    names = ["input_ids", "attention_mask", "position_ids"]
    axes = [(BATCH, TOKENS), (BATCH, ALL), (BATCH, TOKENS)]
    for value, name, sizes in zip(ends, names, axes, strict=False):
        value.name, value.shape = name, onnx_ir.Shape(sizes)
    graph.outputs[0].name = "logits"
    past = ends[len(names) :]
    kinds = [f"{index // 2}.{'value' if index % 2 else 'key'}" for index in range(len(past))]
    for value, present, kind in zip(past, graph.outputs[1:], kinds, strict=True):
        _, heads, _, width = value.shape
        value.name, value.shape = f"past_key_values.{kind}", onnx_ir.Shape((BATCH, heads, PAST, width))
        present.name, present.shape = f"present.{kind}", onnx_ir.Shape((BATCH, heads, ALL, width))
    if not takes_positions:
        graph.inputs.remove(ends[2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of operators that it cannot translate and that this code does not use."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _has_no_graph(reason: str) -> ModelError:
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason was given"
    return ModelError(
        f"The model cannot be traced into an ONNX graph with a key-value cache: {first}",
        code="not_traceable",
        hint="Use another format. Only decoder-only models with attention in every block can be traced.",
    )


def _does_not_fit(what: str) -> ModelError:
    return ModelError(
        f"The weights do not match the architecture in config.json: {what}.",
        code="missing_tensors",
        hint="A shard is missing, or Transformers builds this model differently.",
    )
