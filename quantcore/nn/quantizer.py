"""Quantizes a model in memory, in place (``ModelQuantizer``)."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import fx, nn
from transformers import PreTrainedModel

from quantcore.config.algorithms import RotationConfig
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, QuantizationMode, learns_from_data
from quantcore.config.values import shown
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.model.experts import split_experts
from quantcore.engine.model.parameter_names import projection_names
from quantcore.engine.model.stacks import restack
from quantcore.engine.modules.layers import (
    as_solved,
    find_quantizers,
    quantize_caches,
    quantize_layer,
    quantized_layers,
)
from quantcore.engine.modules.tensor_quantizer import TensorQuantizer
from quantcore.engine.solvers.global_scale import shared_global_scales
from quantcore.errors import CalibrationError, ConfigError
from quantcore.nn.algorithms import Applied, apply_algorithms, layer_result
from quantcore.nn.attention import attention_watched, keys_behind_rope
from quantcore.nn.calibration import calibrate
from quantcore.nn.graph import layers_left, trace
from quantcore.nn.log import log
from quantcore.nn.progress import Callback, Progress
from quantcore.nn.result import QuantizationResult
from quantcore.nn.selection import select_layers


class ModelQuantizer:
    """Quantizes models as ``config`` says.

    The float model is calibrated first, then its layers are replaced. If anything fails before, the model is unchanged,
    except that fused experts (Transformers' 3-D weights) are then one linear layer each. With ``algo_config`` the
    decoder blocks are done one after the other: a failure leaves earlier blocks quantized, so load the model again.
    """

    def __init__(self, config: Config) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"ModelQuantizer takes a Config; {shown(config)} was given.",
                code="invalid_config",
                hint="Give Config(global_quant_config=QuantizationConfig(weight=...)).",
            )
        if config.gguf is not None and config.gguf.names_tensors:
            raise ConfigError(
                "gguf gives types to the tensors of a file that is written from a checkpoint; this model is in memory.",
                code="unsupported_config",
                hint="Use a gguf_* preset and layer_quant_config here, or quantize the folder (`bitfoundry quantize`).",
                field="/gguf",
            )
        self.config = config
        self.result: QuantizationResult | None = None
        """The result of the last ``quantize_model``: layer errors, times, edges. None before the first."""

    def __repr__(self) -> str:
        return f"ModelQuantizer({self.config!r})"

    def quantize_model(
        self, model: nn.Module, dataloader: Iterable[Any] | None = None, *, progress: Callback | None = None
    ) -> nn.Module:
        """Replace the layers of ``model`` in place by ones that compute with quantized numbers; returns the same model.

        In graph mode it returns a new model, the graph of the first batch (see ``graph``), and ``model`` does not
        change. Algorithms then work on the decoder blocks of a copy, and the copy is traced. ``dataloader`` yields
        inputs of ``model``: tensors, dicts or tuples. It is read once, and only if a spec is static or a graph is
        traced. ``progress(phase, done, total)`` is called after every step, in addition to the bar of a terminal or a
        notebook. ``result`` then describes the work. Raises ConfigError, ModelError, CalibrationError or NumericsError,
        each with a hint.
        """
        self._refuse(model)
        self.result, steps, begin = None, Progress(progress), time.monotonic()
        if isinstance(model, PreTrainedModel):
            restack(model)
            split_experts(model, projection_names(model))
        applied = Applied()
        if self.config.quant_mode is QuantizationMode.fx_graph_mode:
            model, dataloader, applied = _traced(model, dataloader, self.config, steps)
        selection = select_layers(model, self.config)
        for warning in selection.warnings:
            log.warning(warning)
        modules, keys = selection.modules, None
        if _rotates(self.config, "r3"):
            modules, keys = keys_behind_rope(model, modules)
        softmax = self.config.softmax_quant_spec
        if keys == {} and softmax is None:
            log.warning("Rotation r3 only costs time here: no output of a k_proj is quantized.")
        if self.config.algo_config and self.config.quant_mode is QuantizationMode.eager_mode:
            batches = list(dataloader or ())
            dataloader = batches
            applied = apply_algorithms(model, self.config, modules, batches, steps)
        rest = {plan: module for plan, module in modules.items() if plan not in applied.weights}
        with ExitStack() as stack:
            if softmax is not None or keys is not None:
                outputs = [plan.name for plan in modules if plan.config.output_tensors is not None]
                stack.enter_context(attention_watched(model, softmax, keys, outputs))
            inside = [spec for spec in (softmax, *(keys or {}).values()) if spec is not None]
            learns = any(map(learns_from_data, inside))
            learned = applied.activations | calibrate(model, rest, dataloader, steps, others_learn=learns)
            scales = shared_global_scales(
                {plan: module for plan, module in rest.items() if plan.config.weight is not None}
            )
            quantizers: dict[LayerPlan, dict[str, TensorQuantizer | None]] = {}
            results = dict(applied.layers)
            for plan, module in steps.track(modules.items(), "round"):
                start = time.monotonic()
                quantizers[plan] = find_quantizers(
                    module, plan, learned.get(plan, Activations()), applied.weights.get(plan), scales.get(plan)
                )
                if plan.config.weight is not None and plan not in results:
                    solved = as_solved(module, plan, quantizers[plan]["weight_quantizer"])
                    results[plan] = layer_result(solved, time.monotonic() - start)
        for plan, module in modules.items():
            quantize_layer(module, plan, quantizers[plan])
        quantize_caches(model)
        self.result = QuantizationResult(
            layers=tuple(results[plan] for plan in modules if plan in results),
            edges=tuple(applied.edges),
            kept=selection.kept,
            warnings=(*selection.warnings, *applied.warnings),
            seconds={**steps.seconds, "total": time.monotonic() - begin},
        )
        log.info("Model quantization has been completed.")
        return model

    @staticmethod
    def freeze(model: nn.Module) -> nn.Module:
        """Replace the float weights by the quantized ones, in the model's dtype; returns the same model, now faster.

        The float weights are gone; the outputs stay the same to the last bit. Raises ConfigError ``not_quantized``.
        """
        layers = [layer for _, layer in quantized_layers(model)]
        if not layers:
            raise ConfigError(
                "This model is not quantized, so there is nothing to freeze.",
                code="not_quantized",
                hint="Freeze the model returned by quantize_model.",
            )
        done: set[int] = set()
        for layer in layers:
            if not layer.frozen:
                layer.freeze(done)
        return model

    def _refuse(self, model: nn.Module) -> None:
        if any(quantized_layers(model)):
            raise ConfigError(
                "This model is already quantized.",
                code="already_quantized",
                hint="Load the float model again to quantize it differently.",
            )
        for field in ("softmax_quant_spec", "kv_cache_quant_config"):
            if getattr(self.config, field) and self.config.quant_mode is QuantizationMode.fx_graph_mode:
                raise ConfigError(
                    f"{field} works on attention modules, which a graph no longer has.",
                    code="invalid_config",
                    hint="Remove it, or use eager mode.",
                    field=f"/{field}",
                )
        if _rotates(self.config, "r3") and self.config.quant_mode is QuantizationMode.fx_graph_mode:
            raise ConfigError(
                "Rotation r3 works on attention modules, but a graph has none.",
                code="invalid_config",
                hint="Remove r3, or use eager mode.",
                field="/algo_config",
            )


def _rotates(config: Config, rotation: str) -> bool:
    return any(getattr(step, rotation) for step in config.algo_config if isinstance(step, RotationConfig))


def _traced(
    model: nn.Module, dataloader: Iterable[Any] | None, config: Config, steps: Progress
) -> tuple[nn.Module, Iterable[Any], Applied]:
    """Return the graph of ``model``, all batches, and the algorithms' choices for its layers.

    The first batch is needed twice. Raises ConfigError for a layer that ``config`` quantizes and that the graph holds
    in another form.
    """
    batches = iter(dataloader or ())
    first = next(batches, None)
    if first is None:
        raise CalibrationError(
            "Graph mode traces the model with the first batch, but the dataloader is empty.",
            code="no_calibration_data",
            hint="Pass quantize_model a dataloader with at least one batch, or use eager mode.",
        )
    if not config.algo_config:
        graph = trace(model, first)
        _check_layers_left(graph, model, config)
        return graph, chain([first], batches), Applied()
    model, all_batches = copy.deepcopy(model), [first, *batches]
    modules = select_layers(model, config).modules
    applied = apply_algorithms(model, config, modules, all_batches, steps)
    solved = {modules[plan].get_parameter("weight").data_ptr(): plan for plan in applied.weights}
    graph = trace(model, first, unchanged=solved.keys())
    _check_layers_left(graph, model, config)
    return graph, all_batches, _in_graph(applied, solved, select_layers(graph, config).modules)


def _check_layers_left(graph: fx.GraphModule, model: nn.Module, config: Config) -> None:
    for name, kind in layers_left(graph, model):
        chosen, why = config.choose(name, kind)
        if chosen is not None and chosen.weight is not None:
            raise ConfigError(
                f"In the graph of the model, the weight of {name} ({kind}) is used by an operation that cannot be "
                f"quantized ({why}).",
                code="unsupported_layer",
                hint="Use eager mode, or exclude the layer.",
                field="/quant_mode",
            )


def _in_graph(applied: Applied, solved: Mapping[int, LayerPlan], modules: Mapping[LayerPlan, nn.Module]) -> Applied:
    """Return ``applied`` for the layers of a graph, which share the weights of the model that it was traced from.

    ``solved``: the address of a weight -> the layer that the algorithms rounded. Raises ConfigError for a layer that
    has another config in the graph: its weight was rounded for its first config.
    """
    renamed = Applied(edges=applied.edges, warnings=applied.warnings)
    for plan, module in modules.items():
        before = solved.get(module.get_parameter("weight").data_ptr())
        if before is None:
            continue
        if plan.config != before.config:
            raise ConfigError(
                f"{before.name} is called {plan.name} in the graph, for which the config has different settings.",
                code="invalid_config",
                hint="Use patterns that match both names, or use eager mode.",
                field="/layer_quant_config",
            )
        renamed.weights[plan] = applied.weights[before]
        renamed.layers[plan] = replace(applied.layers[before], name=plan.name)
        if before in applied.activations:
            renamed.activations[plan] = applied.activations[before]
    return renamed
