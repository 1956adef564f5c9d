"""The checkpoint format of AMD Quark 0.13, which vLLM loads with ``quantization='quark'``.

Weights: see ``quark_weights``. Scales of static inputs and outputs (the KV cache: k_proj and v_proj) are scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.kv_cache import is_of_cache
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    CACHED_LAYERS,
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    is_cached,
    learns_from_data,
)
from quantcore.config.quark import read_quark_config
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    draft_parts,
    draft_patterns,
    is_plain,
    refuse_everywhere,
    refuse_inputs,
    stored_scale_dtype,
)
from quantcore.export.importer import StoredFiles, StoredLayer, not_held
from quantcore.export.quark_weights import family_of, is_mxint8, weight_shape
from quantcore.export.readers import Readers
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    from quantcore.tensors.qtensor import QLayer

QUARK_VERSION = "0.13"
WORD_DTYPES = (Dtype.int4, Dtype.uint4)
QUERIES = "q_proj"
MX_DTYPES = (Dtype.fp4, Dtype.fp6_e3m2, Dtype.fp6_e2m3, Dtype.fp8_e4m3, Dtype.fp8_e5m2)


class QuarkExporter:
    name = "quark"
    title = "AMD Quark safetensors (vLLM: quantization='quark')"
    readers = Readers("vLLM (CPU)", preference=5, in_vllm=True)

    def refuse(self, layer: LayerPlan) -> str | None:
        weight = layer.weight
        if reason := refuse_everywhere(layer):
            return reason
        if layer.config.output_tensors is not None and not (is_cached(layer.name) or layer.name.endswith(QUERIES)):
            allowed = ", ".join((*CACHED_LAYERS, QUERIES))
            return f"its consumers support quantized outputs only of {allowed} (the KV cache and fp8 attention)"
        if weight.over is not None:
            return _refuse_stages(layer)
        if not is_plain(weight):
            return _refuse_blocks(layer)
        if weight.dtype in WORD_DTYPES:
            return _refuse_words(layer)
        if weight.dtype not in (Dtype.int8, Dtype.fp8_e4m3):
            return f"{weight.dtype.value} with plain scales is not among int4, uint4, int8 and fp8_e4m3"
        if weight.qscheme not in (QSchemeType.per_tensor, QSchemeType.per_channel):
            return "8-bit weights can be per_tensor or per_channel"
        if not weight.symmetric:
            return "8-bit weights must be symmetric"
        return refuse_inputs(weight, layer.input_tensors)

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        tensors = family_of(layer).layout(layer, model_dtype)
        for name, spec in _static_activations(layer).items():
            if spec.is_dynamic:  # NVFP4: the scales of groups are found at run time, but their global scale is not
                tensors[f"{name}_scale_2"] = TensorLayout("F32", ())
                continue
            tensors[f"{name}_scale"] = TensorLayout(stored_scale_dtype(spec, model_dtype), ())
            if isinstance(spec.format, IntFormat):
                tensors[f"{name}_zero_point"] = TensorLayout("I8", ())
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        tensors = family_of(layer).encode(layer, quantized.weight)
        params_of = {"input": quantized.inputs, "output": quantized.outputs}
        for name, spec in _static_activations(layer).items():
            params = params_of[name]
            assert params is not None, f"{layer.name} has no {name} scale"
            tensors[f"{name}_scale_2" if spec.is_dynamic else f"{name}_scale"] = params.scale.reshape(())
            if isinstance(spec.format, IntFormat):
                zero_point = torch.zeros(()) if params.zero_point is None else params.zero_point.reshape(())
                tensors[f"{name}_zero_point"] = zero_point.to(torch.int8)
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QLayer

        params: dict[str, QParams] = {}
        for name, spec in _static_activations(layer).items():
            if spec.is_dynamic:
                params[name] = QParams(tensors[f"{name}_scale_2"].float().reshape(()))
                continue
            zero_point = None if spec.symmetric else tensors[f"{name}_zero_point"].to(torch.int32).reshape(1, 1)
            params[name] = QParams(tensors[f"{name}_scale"].float().reshape(1, 1), zero_point)
        return QLayer(family_of(layer).decode(layer, tensors), params.get("input"), params.get("output"))

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        of_all = _usual_form(config.global_quant_config, layers)
        usual = _usual_of_cache(config, layers)
        queries = {} if config.softmax_quant_spec is None else _queries(layers)
        cache = {pattern: _layer_dict(form) for pattern, form in usual.items()}
        drafts = {f"*{part}.*": _layer_dict(_stored_form(layer)) for part, layer in draft_parts(layers).items()}
        return {
            "quant_method": "quark",
            "version": QUARK_VERSION,
            "quant_mode": "eager_mode",
            "global_quant_config": _layer_dict(of_all),
            "layer_quant_config": {
                **self._layer_overrides(config, layers, of_all, usual, queries),
                **queries,
                **cache,
                **drafts,
            },
            "layer_type_quant_config": {},
            "kv_cache_quant_config": cache,
            "kv_cache_post_rope": bool(cache),
            "softmax_quant_spec": _spec_dict(config.softmax_quant_spec, is_input=True),
            "algo_config": None,
            "exclude": [*kept, *(f"re:{pattern}" for pattern in draft_patterns(layers, kept))],  # as vLLM reads it
            "export": {
                "kv_cache_group": list(cache),
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "quark"

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        config, export = read_quark_config(quantization_config), quantization_config.get("export") or {}
        if config.softmax_quant_spec is not None:
            raise not_held("its attention probabilities are quantized (softmax_quant_spec)")
        if export.get("weight_format", "real_quantized") != "real_quantized":
            raise not_held("its weights are rounded floats (fake_quantized), not codes")
        layers = {}
        for name in files.modules_with("weight_scale"):
            in_cache = any(f"{name}.{part}" in files.tensors for part in ("output_scale", "output_scale_2"))
            chosen, _ = config.choose(name, "Linear", in_cache=in_cache)
            if chosen is None or chosen.weight is None:
                raise not_held(f"{name} has a weight_scale, but quantization_config leaves it out")
            if chosen.weight.dtype in WORD_DTYPES and export.get("pack_method", "reorder") != "reorder":
                raise not_held("its 4-bit codes are packed in order (pack_method order)")
            is_word = is_plain(chosen.weight) and chosen.weight.dtype in WORD_DTYPES
            if is_word and chosen.weight.qscheme is QSchemeType.per_channel:
                raise not_held(f"the 4-bit codes of {name} are packed along its inputs (qscheme per_channel)")
            shape = weight_shape(chosen.weight, files.shape(f"{name}.weight"))
            layers[name] = StoredLayer(shape, _with_scales(chosen, name, files))
        return layers

    def load_hint(self, path: str) -> str:
        return f"from vllm import LLM\nllm = LLM({path!r}, quantization='quark')"

    @staticmethod
    def _layer_overrides(
        config: Config,
        layers: tuple[LayerPlan, ...],
        of_all: QuantizationConfig,
        usual: Mapping[str, QuantizationConfig],
        queries: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return overrides by full names, not patterns: readers interpret globs differently, but not exact names."""
        of_cache = {layer.name: usual[pattern] for layer in layers if (pattern := _cache_pattern(config, layer))}
        forms = {layer.name: _stored_form(layer) for layer in layers if not (queries and layer.name.endswith(QUERIES))}
        return {name: _layer_dict(form) for name, form in forms.items() if form != of_cache.get(name, of_all)}


def _queries(layers: tuple[LayerPlan, ...]) -> dict[str, Any]:
    """Return the config of the query projections of fp8 attention, by the only pattern that vLLM 0.32 knows for them.

    Empty if their configs differ: then each layer is listed by its name.
    """
    forms = {_stored_form(layer) for layer in layers if layer.name.endswith(QUERIES)}
    return {f"*{QUERIES}": _layer_dict(forms.pop())} if len(forms) == 1 else {}


def _stored_form(layer: LayerPlan) -> QuantizationConfig:
    """Return the config of ``layer`` as stored: 4-bit weights with one scale a row become groups of the row's width.

    AMD Quark 0.13 writes group_size -1, but cannot load it, and vLLM 0.32 refuses it.
    """
    weight = layer.config.weight
    if weight is None or not is_plain(weight) or weight.dtype not in WORD_DTYPES:
        return layer.config
    whole = replace(weight, qscheme=QSchemeType.per_group, group_size=layer.group_size, ch_axis=None)
    return replace(layer.config, weight=whole)


def _usual_form(config: QuantizationConfig, layers: tuple[LayerPlan, ...]) -> QuantizationConfig:
    """Return the form in which most layers with this config are stored."""
    forms = Counter(_stored_form(layer) for layer in layers if layer.config == config)
    return forms.most_common(1)[0][0] if forms else config


def _usual_of_cache(config: Config, layers: tuple[LayerPlan, ...]) -> dict[str, QuantizationConfig]:
    """Return the most common config of the layers of each pattern in ``kv_cache_quant_config``."""
    counts: dict[str, Counter[QuantizationConfig]] = {}
    for layer in layers:
        if pattern := _cache_pattern(config, layer):
            counts.setdefault(pattern, Counter())[_stored_form(layer)] += 1
    order = [*config.kv_cache_quant_config, *counts]
    return {pattern: counts[pattern].most_common(1)[0][0] for pattern in order if pattern in counts}


def _cache_pattern(config: Config, layer: LayerPlan) -> str | None:
    """Return the pattern that selects the config of the layer's output; the layer's name if none matches.

    Returns None if the output is not cached.
    """
    if not is_of_cache(layer):
        return None
    cache = config.cache_config(layer.name)
    return layer.name if cache is None else cache[0]


def _with_scales(config: QuantizationConfig, name: str, files: StoredFiles) -> QuantizationConfig:
    """Return ``config`` with the scale types of the stored tensors, where the format leaves them open."""
    fields = {"weight": "weight_scale", "input_tensors": "input_scale", "output_tensors": "output_scale"}
    specs = {field: getattr(config, field) for field in fields}
    open_specs = {
        field: spec
        for field, spec in specs.items()
        if spec is not None and is_plain(spec) and (field == "weight" or spec.is_static)
    }
    stored = {field: files.with_scale(spec, f"{name}.{fields[field]}") for field, spec in open_specs.items()}
    return replace(config, **stored)


def _static_activations(layer: LayerPlan) -> dict[str, QuantizationSpec]:
    """Return the specs of the activations that have a scale in the file."""
    specs = {"input": layer.config.input_tensors, "output": layer.config.output_tensors}
    return {name: spec for name, spec in specs.items() if spec is not None and learns_from_data(spec)}


def _refuse_words(layer: LayerPlan) -> str | None:
    if layer.weight.qscheme not in (QSchemeType.per_group, QSchemeType.per_channel):
        return "4-bit weights can be per_group or per_channel"
    if layer.input_tensors is not None:
        return "4-bit weights need unquantized inputs"
    if layer.out_features % 8:
        return f"it packs 8 output channels in a word, but {layer.out_features} is not a multiple of 8"
    return None


def _refuse_blocks(layer: LayerPlan) -> str | None:
    weight, inputs = layer.weight, layer.input_tensors
    is_mx = weight.scale_type is ScaleType.e8m0
    if is_mxint8(weight):
        return _refuse_mxint8(weight, inputs)
    if weight.scale_type is ScaleType.ue4m3:
        return "its NVFP4 has a float32 scale above those of groups: set scale_type e4m3"
    size, dtypes = (32, MX_DTYPES) if is_mx else (16, (Dtype.fp4,))
    if weight.dtype not in dtypes or weight.group_size != size:
        return f"{weight.scale_type.value} scales need {', '.join(dtypes)} in groups of {size}"
    if inputs is None:
        return None
    if not is_plain(inputs):
        same = inputs.scale_type is weight.scale_type and inputs.group_size == size and inputs.dtype in dtypes
        return (
            None if same and inputs.is_dynamic else ("inputs in blocks must be dynamic, with the dtype of the weight")
        )
    static_fp8 = inputs.dtype is Dtype.fp8_e4m3 and inputs.is_static and inputs.qscheme is QSchemeType.per_tensor
    return (
        None
        if is_mx and static_fp8
        else ("inputs must be in blocks too, or static fp8_e4m3 per_tensor with MX weights")
    )


def _refuse_mxint8(weight: QuantizationSpec, inputs: QuantizationSpec | None) -> str | None:
    if weight.dtype is not Dtype.int8 or weight.group_size != 32:
        return "integers with e8m0 scales are int8 in groups of 32 (MXINT8)"
    if inputs is not None:
        return "AMD Quark, the only program that reads MXINT8 weights, does not support quantized inputs with them"
    return None


def _refuse_stages(layer: LayerPlan) -> str | None:
    weight, inputs = layer.weight, layer.input_tensors
    if weight.dtype is not Dtype.int4 or weight.qscheme is not QSchemeType.per_channel or not _is_first_stage(weight):
        return "two stages are int4 per_channel over fp8_e4m3 per_tensor with a float32 scale"
    if layer.out_features % 8 or layer.in_features % 8:
        return f"it packs 8 codes in a word, but {layer.out_features} x {layer.in_features} is not a multiple of 8"
    if inputs is None or (inputs.dtype is Dtype.fp8_e4m3 and inputs.qscheme is QSchemeType.per_tensor):
        return None
    return "inputs of two-stage weights are fp8_e4m3 per_tensor"


def _is_first_stage(weight: QuantizationSpec) -> bool:
    """Return True if the format supports the first stage."""
    first = weight.over
    return first is not None and first.dtype is Dtype.fp8_e4m3 and first.scale_type is ScaleType.float32


def _layer_dict(config: QuantizationConfig) -> dict[str, Any]:
    return {
        "weight": _spec_dict(config.weight, is_input=False),
        "input_tensors": _spec_dict(config.input_tensors, is_input=True),
        "output_tensors": _spec_dict(config.output_tensors, is_input=True),
        "bias": None,
        "target_device": None,
    }


def _spec_dict(spec: QuantizationSpec | None, *, is_input: bool) -> Any:
    """Return a spec in the form of Quark 0.13: a list for two stages."""
    if spec is None:
        return None
    if spec.over is not None:
        return [_stage_dict(spec.over, is_input=is_input), _stage_dict(spec, is_input=is_input)]
    if spec.scale_type is ScaleType.e4m3:
        scales = QuantizationSpec(dtype=Dtype.fp8_e4m3, scale_type=ScaleType.float32)
        return [
            _stage_dict(spec, is_input=is_input) | {"scale_type": "float32", "scale_format": "float32"},
            _stage_dict(scales, is_input=is_input) | {"is_scale_quant": True},
        ]
    return _stage_dict(spec, is_input=is_input)


def _observer_name(spec: QuantizationSpec) -> str | None:
    """Return the observer that AMD Quark's importer accepts for such a tensor."""
    if is_mxint8(spec):
        return "PerGroupMinMaxObserver"
    return "PerBlockMXObserver" if spec.scale_type in (ScaleType.e8m0, ScaleType.e4m3) else spec.observer_cls


def _stage_dict(spec: QuantizationSpec, *, is_input: bool) -> dict[str, Any]:
    """Return a stage with all keys of Quark 0.13. Groups lie along axis -1; per_channel inputs are per token."""
    channel_axis = 1 if is_input else 0
    is_mx = spec.scale_type is ScaleType.e8m0
    in_blocks = spec.scale_type in (ScaleType.e8m0, ScaleType.e4m3)
    return {
        "dtype": spec.dtype.value,
        "observer_cls": _observer_name(spec),
        "is_dynamic": spec.is_dynamic,
        "qscheme": spec.qscheme.value,
        "ch_axis": {QSchemeType.per_channel: channel_axis, QSchemeType.per_group: -1}.get(spec.qscheme),
        "group_size": spec.group_size,
        "block_size": None,
        "symmetric": None if in_blocks and not is_mxint8(spec) else spec.symmetric,
        "round_method": spec.round_method.value,
        "scale_type": "float" if is_mx else spec.scale_type.value,
        "scale_format": "e8m0" if is_mx else None,
        "scale_calculation_mode": spec.scale_calculation_mode.value if spec.scale_calculation_mode else None,
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }


_exporter: Exporter = EXPORTERS.add("quark")(QuarkExporter())
