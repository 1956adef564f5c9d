"""Traces a model for FX graph mode, as a graph of operations (torch.export), with batch norms folded into convolutions.

Linear layers, convolutions and embeddings of the graph become modules again, under the names of their weights. So
patterns, calibration, freezing and exports work as they do on modules. In addition the graph shows operations on bare
parameters (``functional.linear``) and the batch norms that follow a convolution.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quantcore.engine.modules.layers import kind_of, num_groups
from quantcore.errors import ModelError
from quantcore.formats.weight_layout import canonical, stored
from quantcore.nn.calibration import as_arguments, evaluating

aten = torch.ops.aten


@dataclass(frozen=True)
class Operation:
    """An operation that is a layer: how to make its module, and the names of its inputs in the operation's schema.

    ``others`` are further tensors that the module is called with. ``in_tuple``: the operation's output is the first of
    several; only a backward pass needs the others.
    """

    make: Callable[[torch.Tensor, dict[str, Any]], nn.Module]
    source: str = "input"
    weight: str = "weight"
    bias: str | None = "bias"
    others: tuple[str, ...] = ()
    in_tuple: bool = False

    def made(self, weight: torch.Tensor, options: dict[str, Any]) -> nn.Module:
        with torch.device("meta"):
            return self.make(weight, options)


def _conv(parent: Any) -> Callable[[torch.Tensor, dict[str, Any]], nn.Module]:
    """Return a function that makes the module of a weight [out, in / groups, *kernel]."""
    return lambda weight, options: parent(
        weight.shape[1] * options["groups"], weight.shape[0], tuple(weight.shape[2:]), **options
    )


def _transposed(weight: torch.Tensor, options: Any) -> nn.Module:
    """Make the module of a weight [in, out / groups, *kernel]."""
    channels = weight.shape[0], weight.shape[1] * options["groups"]
    return nn.ConvTranspose2d(*channels, tuple(weight.shape[2:]), **options)  # type: ignore[arg-type]


def _conv1d_of_gpt2(weight: torch.Tensor, _: Any) -> nn.Module:
    layer: nn.Module = Conv1D(weight.shape[1], weight.shape[0])  # type: ignore[no-untyped-call]
    return layer


def _embedding_bag(weight: torch.Tensor, options: dict[str, Any]) -> nn.Module:
    return nn.EmbeddingBag(*weight.shape, **{**options, "mode": ("sum", "mean", "max")[options["mode"]]})


OPERATIONS = {
    aten.linear.default: Operation(lambda weight, _: nn.Linear(weight.shape[1], weight.shape[0])),
    aten.addmm.default: Operation(_conv1d_of_gpt2, "mat1", "mat2", "self"),
    aten.conv1d.default: Operation(_conv(nn.Conv1d)),
    aten.conv1d.padding: Operation(_conv(nn.Conv1d)),
    aten.conv2d.default: Operation(_conv(nn.Conv2d)),
    aten.conv2d.padding: Operation(_conv(nn.Conv2d)),
    aten.conv_transpose2d.input: Operation(_transposed),
    aten.embedding.default: Operation(lambda weight, _: nn.Embedding(*weight.shape), "indices", bias=None),
    aten.embedding_bag.padding_idx: Operation(
        _embedding_bag, "indices", bias=None, others=("offsets", "per_sample_weights"), in_tuple=True
    ),
}


def trace(model: nn.Module, batch: Any, unchanged: Collection[int] = ()) -> fx.GraphModule:
    """Return the graph of ``model`` in evaluation mode, as a module that is called like it. ``model`` does not change.

    ``batch`` is an example of a call's inputs; the sizes of its tensors may change from call to call as far as the
    model allows. The weights are shared with ``model`` until they are frozen; no batch norm is folded into those at the
    addresses ``unchanged``. Raises ModelError ``not_traceable``.
    """
    exported = export_program(model, batch).module()
    model_graph = fx.GraphModule(exported, exported.graph)  # without its ban on train()
    _make_modules(model_graph, model)
    _fold_batch_norms(model_graph, unchanged)
    model_graph.graph.eliminate_dead_code()
    model_graph.delete_all_unused_submodules()
    model_graph.recompile()
    return model_graph


def export_program(
    model: nn.Module, batch: Any, cast: Callable[[Any], Any] = lambda value: value
) -> torch.export.ExportedProgram:
    """Export ``model`` in evaluation mode by torch.export; see ``trace``. ``cast`` is applied to each input."""
    arguments = tree_map(lambda value: cast(_doubled(value)), as_arguments(batch, next(model.parameters()).device))
    named = inspect.signature(model.forward).bind(*arguments[0], **arguments[1]).arguments
    with evaluating(model), _without_cache(model), torch.no_grad():
        try:
            return torch.export.export(model, *arguments, dynamic_shapes=tree_map(_free, dict(named)))
        except Exception as error:  # torch.export passes on all errors of the model
            raise ModelError(
                f"The model cannot be traced into a graph: {str(error).strip().splitlines()[0]}",
                code="not_traceable",
                hint="A model with data-dependent control flow has no graph; quantize it in eager mode.",
            ) from error


def _doubled(value: Any) -> Any:
    """Repeat a batch of one, because torch.export treats a size of 1 as a constant."""
    is_one = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1
    return torch.cat([value, value]) if is_one else value


def _free(value: Any) -> Any:
    return dict.fromkeys(range(value.ndim), Dim.AUTO) if isinstance(value, torch.Tensor) else None


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Switch the key-value cache of a language model off inside the block."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model.config, "use_cache"):
        yield
        return
    before = model.config.use_cache
    model.config.use_cache = False
    try:
        yield
    finally:
        model.config.use_cache = before


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operation by name, with defaults."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    positional = dict(zip((parameter.name for parameter in parameters), node.args, strict=False))
    return {p.name: p.default_value for p in parameters if p.has_default_value()} | positional | dict(node.kwargs)


def _make_modules(model: fx.GraphModule, original: nn.Module) -> None:
    """Replace operations by calls of modules if they are layers and their weights are parameters."""
    made: dict[str, str] = {}  # operation and its constants -> name of the module
    shared: dict[int, nn.Parameter] = {}
    constants = _constants(model)
    for node in list(model.graph.nodes):
        operation = OPERATIONS.get(node.target) if node.op == "call_function" else None
        if operation is None:
            continue
        options = _arguments(node)
        source, weight = options.pop(operation.source), options.pop(operation.weight)
        bias = None if operation.bias is None else options.pop(operation.bias)
        others = [options.pop(name) for name in operation.others]
        output = _output(node) if operation.in_tuple else node
        plain = options.get("alpha", 1) == options.get("beta", 1) == 1  # of addmm
        if (
            output is None
            or not plain
            or not _is_parameter(model, weight)
            or not (bias is None or _is_parameter(model, bias))
        ):
            continue
        key = repr((node.target, weight.target, bias, options))
        if key not in made:
            made[key] = _name_of(node, original, weight.target, set(made.values()))
            layer = operation.made(_get(model, weight.target), options)
            _give(layer, "weight", _get(model, weight.target), shared)
            _give(layer, "bias", None if bias is None else _get(model, bias.target), shared)
            for name, value in constants.get(made[key], {}).items():
                layer.register_buffer(name, value, persistent=False)
            model.add_submodule(made[key], layer)
        with model.graph.inserting_before(node):
            call = model.graph.call_module(made[key], (source, *others))
        call.meta = output.meta | {"nn_module_stack": node.meta["nn_module_stack"]}
        output.replace_all_uses_with(call)
        for user in list(node.users) if operation.in_tuple else ():
            model.graph.erase_node(user)
        model.graph.erase_node(node)


def _output(node: fx.Node) -> fx.Node | None:
    """Return the first output of an operation with several; None if another one is used."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    unused = all(not user.users for index, user in items.items() if index != 0)
    return items.get(0) if unused and len(items) == len(node.users) else None


def layers_left(graph: fx.GraphModule, original: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, class) of the layers of ``original`` whose weights the graph uses in operations of other kinds."""
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr" and node.users]
    bare = {_get(graph, target).data_ptr() for target in targets if isinstance(_get(graph, target), torch.Tensor)}
    for name, module in original.named_modules():
        kind = kind_of(module)
        if kind is not None and module.get_parameter("weight").data_ptr() in bare:
            yield name, kind


def _constants(model: fx.GraphModule) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that hooks of modules add to the graph (a rotation's signs), by module and name."""
    constants: dict[str, dict[str, torch.Tensor]] = {}
    for node in model.graph.nodes:
        if node.op == "get_attr" and not isinstance(value := _get(model, node.target), nn.Parameter):
            owner, _, name = str(node.target).rpartition(".")
            constants.setdefault(owner, {})[name] = value
    return constants


def _give(layer: nn.Module, name: str, value: torch.Tensor | None, shared: dict[int, nn.Parameter]) -> None:
    """Register a new parameter with this value, so that freezing the graph does not change the float model."""
    if value is not None:
        layer.register_parameter(name, shared.setdefault(id(value), nn.Parameter(value.detach())))
    elif name in layer._parameters:
        layer.register_parameter(name, None)


def _is_parameter(model: fx.GraphModule, node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and isinstance(_get(model, node.target), nn.Parameter)


def _get(model: nn.Module, target: Any) -> Any:
    owner, _, name = str(target).rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _name_of(node: fx.Node, original: nn.Module, target: str, taken: set[str]) -> str:
    """Return the name of the module of this operation if it has only a weight and a bias.

    Otherwise return ``<the weight's>_layer``. The weight's own name is not enough: the graph knows a shared weight by
    one name only.
    """
    path = str(next(reversed(node.meta["nn_module_stack"].values()))[0]).partition("@")[0]  # "conv@1": its second call
    module = original.get_submodule(path)
    inside = {*module._parameters, *module._buffers, *module._modules}
    if path not in taken and kind_of(module) is not None and inside <= {"weight", "bias"}:
        return path
    return next(name for i in range(len(taken) + 1) if (name := f"{target}_layer{i or ''}") not in taken)


def _fold_batch_norms(model: fx.GraphModule, unchanged: Collection[int]) -> None:
    """Fold each batch norm into the weight and bias of the layer before it, if nothing else uses that layer's output.

    Layers whose weights lie at the addresses ``unchanged`` keep their weights.

    y = (W x + b - mean) / sqrt(var + eps) * gamma + beta, channel by channel; computed in float64.
    """
    calls = Counter(node.target for node in model.graph.nodes if node.op == "call_module")
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for node in list(model.graph.nodes):
        if node.op != "call_function" or node.target is not aten.batch_norm.default:
            continue
        norm = _arguments(node)
        source = norm["input"]
        if source.op != "call_module" or len(source.users) > 1 or calls[source.target] > 1 or norm["training"]:
            continue
        layer = model.get_submodule(source.target)
        weight = layer.get_parameter("weight")
        is_per_channel = source.meta["val"].ndim == weight.ndim and not isinstance(layer, nn.Embedding)
        if not is_per_channel or owners[id(weight)] > 1 or weight.data_ptr() in unchanged:
            continue
        parts = [norm[name] for name in ("weight", "bias", "running_mean", "running_var")]
        _fold(layer, norm["eps"], *(None if part is None else _get(model, part.target).double() for part in parts))
        node.replace_all_uses_with(source)
        model.graph.erase_node(node)


def _fold(layer: Any, eps: float, *norm: Any) -> None:
    """Fold ``norm`` (gamma, beta, mean, var) into a layer. Gamma and beta, like the layer's bias, may be None."""
    gamma, beta, mean, var = norm
    kind, groups, dtype = str(kind_of(layer)), num_groups(layer), layer.weight.dtype
    factor = (var + eps).rsqrt() * (1 if gamma is None else gamma)
    weight = canonical(layer.weight.detach().double(), kind, groups)
    weight = stored(weight * factor.view(-1, *[1] * (weight.ndim - 1)), kind, groups)
    bias = ((0 if layer.bias is None else layer.bias.detach().double()) - mean) * factor + (0 if beta is None else beta)
    layer.weight, layer.bias = nn.Parameter(weight.to(dtype)), nn.Parameter(bias.to(dtype))
