"""``ModelExporter`` writes a frozen model from memory, with the same bits as the pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import PreTrainedModel

from quantcore.checkpoint.artifact import building, write_json
from quantcore.checkpoint.experts import EXPERT
from quantcore.checkpoint.layout import TensorLayout
from quantcore.checkpoint.own_head import untie_own_head
from quantcore.config.kv_cache import is_of_cache
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, Dtype, QSchemeType
from quantcore.config.values import STRICT, Checked, shown
from quantcore.engine.containers.onnx_nodes import OPSET
from quantcore.engine.model.module_names import with_module_names
from quantcore.engine.model.parameter_names import stores_single_experts
from quantcore.engine.modules.layers import QuantizedLayer, quantized_layers
from quantcore.engine.transforms.rotation.fold import rotates_input
from quantcore.errors import ConfigError, ModelError, unknown_value
from quantcore.export import (
    EXPORTERS,
    Container,
    Exporter,
    Fitting,
    check_exports,
    check_fitted,
    encoded,
    file_layouts,
    holds_codes,
    json_files,
    layouts_of,
)
from quantcore.nn.attention import QUERIES, HeadRotation, attention_modules
from quantcore.nn.codes import encode_layer, learned_params
from quantcore.nn.gguf import DTYPE_NAMES, export_gguf
from quantcore.nn.layer_names import Stored, find_stored
from quantcore.nn.onnx import export_onnx
from quantcore.tensors.sink import Sink

WEIGHT_FORMATS = ("real_quantized", "fake_quantized")


@dataclass(kw_only=True, config=STRICT)
class JsonExporterConfig(metaclass=Checked):
    """Options of safetensors exports.

    ``weight_format``: ``real_quantized`` for codes in the format of ``custom_mode``, or ``fake_quantized`` for the
    model's own format with rounded weights. ``kv_cache_group``: patterns of the key and value projections, which must
    have output scales. Keys and values keep a scale each, as in the files of the engine; AMD Quark gives both the
    larger one.
    """

    weight_format: str = "real_quantized"
    kv_cache_group: list[str] = field(default_factory=list)


@dataclass(config=STRICT)
class OnnxExporterConfig(metaclass=Checked):
    """Options of ONNX exports; there are none yet."""


@dataclass(config=STRICT)
class ExporterConfig(metaclass=Checked):
    """Options of all exports."""

    json_export_config: JsonExporterConfig = field(default_factory=JsonExporterConfig)
    onnx_export_config: OnnxExporterConfig | None = None


class ModelExporter:
    """Writes frozen models into ``export_dir``, a folder that must be empty or must not exist.

    ``ModelExporter("folder")`` is short for the default config.
    """

    def __init__(self, config: ExporterConfig | str | Path | None = None, export_dir: str | Path | None = None) -> None:
        if isinstance(config, str | Path):
            config, export_dir = None, config
        if export_dir is None:
            raise ConfigError(
                "ModelExporter has no folder to write to.",
                code="invalid_config",
                hint="Give export_dir.",
                field="/export_dir",
            )
        if not isinstance(config, ExporterConfig | None):
            raise ConfigError(
                f"ModelExporter takes an ExporterConfig; {shown(config)} was given.",
                code="invalid_config",
                hint="Pass ExporterConfig(json_export_config=JsonExporterConfig()), or omit it.",
                field="/config",
            )
        self.config = config or ExporterConfig()
        self.export_dir = Path(export_dir)

    def export_safetensors_model(
        self, model: nn.Module, quant_config: Config, tokenizer: Any = None, custom_mode: str = "quark"
    ) -> None:
        """Write the weights of ``model``, config.json and the tokenizer. ``custom_mode`` is the format.

        Raises ConfigError for a model that is not frozen or was quantized with another config than ``quant_config``,
        and for a layer that the format cannot hold; ProofError if the codes do not reproduce the model's weights;
        ModelError for a model that stores its layers in another form.
        """
        layers = _frozen_layers(model)
        options = replace(self.config.json_export_config)  # checked again: its fields may have been set since
        export = _format(options, custom_mode)
        exporter = EXPORTERS.get(export)
        if isinstance(exporter, Container):
            raise ConfigError(
                f"This method writes safetensors files, but {export} has its own file format.",
                code="incompatible_export",
                hint=f"Call export_{export}_model instead.",
                field="/custom_mode",
            )
        plans = [layer.plan for layer in layers.values()]
        _check_running(model)
        probabilities = attention_scales(model, layers, quant_config, export)
        _check_plans(plans, quant_config)
        check_exports(plans, (export,))
        check_fitted(plans, export)
        _check_cache_group(layers, options)
        with building(self.export_dir) as folder:
            stored = find_stored(model)
            model_config = _model_config(model, stored)
            if holds_codes(export):
                _write(stored, exporter, folder, model_config, probabilities)
            else:
                _write_plain(model, stored, folder)
            stored_plans = tuple(replace(layer.plan, name=name) for name, layer in stored.layers.items())
            named, kept = with_module_names(model_config, stored_plans, stored.kept)
            for name, content in json_files(export, model_config, quant_config, named, kept).items():
                write_json(folder / name, content)
            for part in (getattr(model, "generation_config", None), tokenizer):
                if part is not None:
                    part.save_pretrained(folder)

    def export_onnx_model(
        self,
        model: nn.Module,
        input_args: Any,
        input_names: Sequence[str] = (),
        output_names: Sequence[str] = (),
        opset_version: int = OPSET,
    ) -> None:
        """Write ``model.onnx`` with quantize and dequantize nodes. ``input_args``: an example of a batch.

        The sizes of the inputs may change from call to call as far as the model allows. Raises ConfigError for a model
        that is not frozen or a spec without an ONNX node, ModelError for a model that cannot be traced.
        """
        _frozen_layers(model)
        with building(self.export_dir) as folder:
            export_onnx(
                model,
                input_args,
                folder / "model.onnx",
                opset_version=opset_version,
                input_names=input_names,
                output_names=output_names,
            )

    def export_gguf_model(self, model: nn.Module, tokenizer_path: str | Path, model_type: str | None = None) -> None:
        """Write ``model.gguf`` for llama.cpp: weights, shapes and the tokenizer of the folder ``tokenizer_path``.

        The model gets the float16 scales and minimums of the file, so that both give the same results; the gguf presets
        have them from the start. ``model_type``, if given, must be that of the model's config. Raises ConfigError for
        a model that is not frozen or that GGUF cannot hold, ModelError for a tokenizer that does not fit.
        """
        layers = _frozen_layers(model)
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"GGUF is for Transformers language models, and {type(model).__name__} is not one.",
                code="incompatible_export",
                hint="Export ONNX: export_onnx_model.",
            )
        if model_type not in (None, model.config.model_type):
            raise unknown_value(
                "model_type", model_type, (model.config.model_type,), code="invalid_config", field="/model_type"
            )
        plans = [layer.plan for layer in layers.values()]
        _check_running(model)
        _refuse_attention(model)
        _check_weights(plans)
        check_exports(plans, ("gguf",))
        with building(self.export_dir) as folder:
            stored = find_stored(model)
            export_gguf(stored, _model_config(model, stored), Path(tokenizer_path), folder)


def _check_cache_group(layers: dict[str, QuantizedLayer], config: JsonExporterConfig) -> None:
    """Raise ConfigError for a pattern of ``kv_cache_group`` that names no layer, or one without an output scale."""
    for pattern in config.kv_cache_group:
        named = [name for name in layers if fnmatchcase(name, pattern)]
        unscaled = [name for name in named if not _has_cache_scale(layers[name])]
        if unscaled or not named:
            raise ConfigError(
                f"kv_cache_group names {unscaled[0]}, whose output has no static per_tensor symmetric scale."
                if unscaled
                else f"kv_cache_group has '{pattern}', which matches no quantized layer.",
                code="invalid_config",
                hint="Set output_tensors for it (layer_quant_config or kv_cache_quant_config), or remove it.",
                field="/json_export_config/kv_cache_group",
            )


def _has_cache_scale(layer: QuantizedLayer) -> bool:
    params = learned_params(layer.output_quantizer)
    return params is not None and params.zero_point is None and params.scale.numel() == 1


def _format(config: JsonExporterConfig, custom_mode: str) -> str:
    if config.weight_format not in WEIGHT_FORMATS:
        raise unknown_value(
            "weight_format",
            config.weight_format,
            WEIGHT_FORMATS,
            code="invalid_config",
            field="/json_export_config/weight_format",
        )
    return custom_mode if config.weight_format == "real_quantized" else "fake_quantized"


def _frozen_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    layers = dict(quantized_layers(model))
    if not layers or not all(layer.frozen for layer in layers.values()):
        raise ConfigError(
            "The model is not frozen.",
            code="not_frozen",
            hint="Export the model returned by ModelQuantizer.freeze.",
        )
    return layers


def attention_scales(
    model: nn.Module, layers: dict[str, QuantizedLayer], config: Config, export: str
) -> dict[int, torch.Tensor]:
    """Return the scales of attention probabilities, by the id of the layer that computes the queries.

    Raises ConfigError for quantized attention that the files cannot store: formats other than ``quark``, probabilities
    without one static fp8 scale, or queries that are not quantized at the output of q_proj.
    """
    spec = config.softmax_quant_spec
    if spec is None:
        return {}
    plain = spec.dtype is Dtype.fp8_e4m3 and spec.is_static and spec.qscheme is QSchemeType.per_tensor
    if export != "quark" or not plain:
        raise ConfigError(
            f"The {export} format cannot store softmax_quant_spec. AMD Quark's format can, with one static fp8_e4m3 "
            "scale.",
            code="incompatible_export",
            hint="Export with custom_mode quark, or quantize without softmax_quant_spec: the weights are the same.",
            field="/softmax_quant_spec",
        )
    scales = {}
    for name, attention in attention_modules(model, "softmax_quant_spec").items():
        queries = layers.get(f"{name}.{QUERIES}")
        if queries is None or learned_params(queries.output_quantizer) is None:
            raise ConfigError(
                f"Files store the scale of q_proj's output, but the queries of {name} are quantized later.",
                code="incompatible_export",
                hint='Use the same spec for q_proj: layer_quant_config {"*q_proj": ... output_tensors ...}, as '
                "presets.with_attention does.",
                field="/layer_quant_config",
            )
        scales[id(queries)] = attention.get_submodule("softmax_quantizer").get_buffer("scale")
    return scales


def _check_running(model: nn.Module) -> None:
    """Raise ConfigError for rotations that the model does at run time and no file can store."""
    online = (
        ("r3", "queries and keys", lambda part: isinstance(part, HeadRotation)),
        ("r4", "the input of an MLP's last layer", rotates_input),
    )
    for rotation, rotated, is_rotating in online:
        if any(map(is_rotating, model.modules())):
            raise ConfigError(
                f"No format stores rotation {rotation}, which rotates {rotated} while the model runs.",
                code="incompatible_export",
                hint=f"Only the model in memory and its ONNX export run it. For files, quantize without {rotation}.",
                field="/algo_config",
            )


def _refuse_attention(model: nn.Module) -> None:
    if any("softmax_quantizer" in module._modules for module in model.modules()):
        raise ConfigError(
            "GGUF cannot store quantized attention, so the file would not match the model.",
            code="incompatible_export",
            hint="Quantize without softmax_quant_spec: the weights are the same.",
            field="/softmax_quant_spec",
        )


def _check_plans(plans: list[LayerPlan], config: Config) -> None:
    odd = [
        plan.name for plan in plans if config.choose(plan.name, plan.kind, in_cache=is_of_cache(plan))[0] != plan.config
    ]
    if odd:
        raise ConfigError(
            f"{len(odd)} layer(s) were not quantized as in quant_config, first '{odd[0]}'.",
            code="other_config",
            hint="Pass the config that was passed to ModelQuantizer.",
            field="/quant_config",
        )
    _check_weights(plans)


def _check_weights(plans: list[LayerPlan]) -> None:
    unheld = [plan.name for plan in plans if plan.config.weight is None]
    if unheld:
        raise ConfigError(
            f"{len(unheld)} layer(s) have quantized outputs but a float weight, first '{unheld[0]}'.",
            code="incompatible_export",
            hint="Checkpoints store activation scales only with quantized weights: set a weight spec for these "
            "layers too.",
            field="/quant_config",
        )


def _write(
    stored: Stored,
    exporter: Exporter,
    folder: Path,
    model_config: dict[str, Any],
    probabilities: dict[int, torch.Tensor],
) -> None:
    """Write all weights, one layer at a time; ``probabilities``: see ``attention_scales``."""
    scales = {
        f"{name.removesuffix(QUERIES)}prob_output_scale": probabilities[id(layer)].reshape(())
        for name, layer in stored.layers.items()
        if id(layer) in probabilities
    }
    floats = (stored.floats | scales).items()
    layouts = {name: TensorLayout(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in floats}
    plans = {name: replace(layer.plan, name=name) for name, layer in stored.layers.items()}
    dtypes = {name: DTYPE_NAMES[layer.canonical_weight().dtype] for name, layer in stored.layers.items()}
    for name in stored.layers:
        layouts |= layouts_of(exporter, plans[name], dtypes[name])
    if isinstance(exporter, Fitting):
        exporter.check(model_config, layouts)
    layouts, parts = file_layouts(exporter, model_config, layouts)
    with closing(Sink(folder, layouts, tensors=parts)) as sink:
        for name, tensor in floats:
            sink.write(name, tensor)
        for name, layer in stored.layers.items():
            for part, tensor in encoded(exporter, plans[name], encode_layer(layer), dtypes[name]).items():
                sink.write(part, tensor.to(sink.dtype_of(part)))
        sink.finish()


def _write_plain(model: nn.Module, stored: Stored, folder: Path) -> None:
    """Write the frozen weights unchanged. Raises ModelError for experts that Transformers could not load again."""
    experts = [name for name in stored.layers if EXPERT.match(name)]
    if experts and isinstance(model, PreTrainedModel) and not stores_single_experts(model):
        raise ModelError(
            f"Checkpoints of such models store experts in stacks, but {experts[0]} is a separate layer.",
            code="unsupported_layer",
            hint="The engine writes such stacks: bitfoundry quantize --model_export fake_quantized.",
        )
    weights = {f"{name}.weight": layer.get_parameter("weight").detach() for name, layer in stored.layers.items()}
    tensors = stored.floats | weights
    layouts = {name: TensorLayout(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with closing(Sink(folder, layouts)) as sink:
        for name, tensor in tensors.items():
            sink.write(name, tensor)
        sink.finish()


def _model_config(model: nn.Module, stored: Stored) -> dict[str, Any]:
    """Return config.json of a Transformers model, as ``save_pretrained`` writes it; empty for others.

    It ties nothing if the files hold a head of its own.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    data: dict[str, Any] = json.loads(model.config.to_json_string())
    weights = (*stored.floats, *(f"{name}.weight" for name in stored.layers))
    return untie_own_head(data | {"architectures": [type(model).__name__]}, weights)[0]
