"""The checkpoint format of NVIDIA ModelOpt, which vLLM loads with ``quantization='modelopt'`` and its variants.

Layout as ``modelopt.torch.export`` 0.47 writes it, in one of four algorithms for each layer. All scales are factors:

FP8           weight fp8_e4m3 [out, in]; weight_scale float32 []; input_scale float32 []
NVFP4         weight uint8 [out, in / 2], two fp4 codes in a byte, the first one in the low bits; weight_scale fp8_e4m3
              [out, in / 16]; weight_scale_2 float32 [], the scale of the scales; input_scale float32 [], the same for
              the inputs, whose groups get their scales at run time
W4A16_NVFP4   the same without input_scale
MXFP8         weight fp8_e4m3 [out, in]; weight_scale uint8 [out, in / 32], a byte of e8m0; inputs likewise at run time

Scales of an fp8 KV cache belong to the projections: ``k_proj.k_scale`` and ``v_proj.v_scale`` float32 []. Two files say
the same: ``quantization_config`` of config.json, and ``hf_quant_config.json``, which older readers look for. Layers of
several algorithms are MIXED_PRECISION and listed by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.headers import read_json
from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec, ScaleType
from quantcore.errors import ModelError
from quantcore.export.exporter import EXPORTERS, Exporter, Tensors, is_static_fp8, kept_drafts, refuse_everywhere
from quantcore.export.importer import StoredFiles, StoredLayer, finite, not_held
from quantcore.export.readers import Readers

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.affine import QParams
    from quantcore.tensors.qtensor import QLayer

METHOD = "modelopt"
OWN_FILE = "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""The version whose layout this is; older versions of vLLM refuse files that name another producer."""
MIXED = "MIXED_PRECISION"
GROUP_SIZE, MX_GROUP_SIZE = 16, 32
GROUP_SIZES = {"NVFP4": GROUP_SIZE, "W4A16_NVFP4": GROUP_SIZE, "MXFP8": MX_GROUP_SIZE}
CACHE_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}
FP8_NUMBERS = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4_NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
MXFP8_NUMBERS = {"dynamic": False, "num_bits": 8, "type": "float", "group_size": MX_GROUP_SIZE}
GROUPS: dict[str, dict[str, Any]] = {
    "FP8": {"input_activations": FP8_NUMBERS, "weights": FP8_NUMBERS},
    "NVFP4": {"input_activations": NVFP4_NUMBERS, "weights": NVFP4_NUMBERS},
    "W4A16_NVFP4": {"weights": NVFP4_NUMBERS},
    "MXFP8": {"input_activations": MXFP8_NUMBERS, "weights": MXFP8_NUMBERS},
}
"""The entry of ``config_groups`` for each algorithm, without its targets."""
CODE_DTYPES = {"FP8": "F8_E4M3", "NVFP4": "U8", "W4A16_NVFP4": "U8", "MXFP8": "F8_E4M3"}
"""The dtype in safetensors of each algorithm's weights."""
SCALES_OF_GROUPS = {"NVFP4": "F8_E4M3", "W4A16_NVFP4": "F8_E4M3", "MXFP8": "U8"}
"""The dtype in safetensors of the scales of groups."""


class ModelOptReaders(Readers):
    def not_in_transformers(self, layers: Sequence[LayerPlan]) -> str | None:
        return (
            "Transformers does not know the modelopt format: it fails on NVFP4, and takes fp8 codes for weights without"
            " their scales."
        )


class ModelOptExporter:
    name = METHOD
    title = "NVIDIA ModelOpt safetensors (vLLM: quantization='modelopt')"
    readers = ModelOptReaders("vLLM (CPU)", preference=7, in_vllm=True, vllm_reads_head=True)

    def refuse(self, layer: LayerPlan) -> str | None:
        weight, inputs, outputs = layer.weight, layer.input_tensors, layer.config.output_tensors
        if reason := refuse_everywhere(layer):
            return reason
        if outputs is not None and (not is_static_fp8(outputs) or layer.name.rpartition(".")[2] not in CACHE_SCALES):
            return f"only outputs of {' and '.join(CACHE_SCALES)} have a scale, static fp8_e4m3 per_tensor"
        is_fp8 = is_static_fp8(weight) and is_static_fp8(inputs)
        is_nvfp4 = _is_nvfp4(weight) and (inputs is None or (_is_nvfp4(inputs) and inputs.is_dynamic))
        is_mxfp8 = _is_mxfp8(weight) and inputs is not None and _is_mxfp8(inputs)
        if not (is_fp8 or is_nvfp4 or is_mxfp8):
            return (
                "layers are NVFP4 with inputs in NVFP4 or not quantized, MXFP8 with inputs in MXFP8, or fp8_e4m3 with "
                "one static scale each for the weight and the inputs"
            )
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        scalar = TensorLayout("F32", ())
        if _is_nvfp4(layer.weight):
            tensors = {
                "weight": TensorLayout("U8", (layer.out_features, layer.in_features // 2)),
                "weight_scale": TensorLayout("F8_E4M3", layer.num_scales),
                "weight_scale_2": scalar,
            }
        else:
            scale = TensorLayout("U8", layer.num_scales) if _is_mxfp8(layer.weight) else scalar
            tensors = {"weight": TensorLayout("F8_E4M3", layer.shape), "weight_scale": scale}
        if _has_input_scale(layer):
            tensors["input_scale"] = scalar
        if layer.config.output_tensors is not None:
            tensors[_kv_scale(layer)] = scalar
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        from quantcore.formats.floats import encode_e8m0
        from quantcore.tensors.packing import pack

        codes, params = quantized.weight.codes, quantized.weight.params
        if _is_mxfp8(layer.weight):
            tensors = {"weight": codes, "weight_scale": encode_e8m0(params.scale)}
        elif params.global_scale is None:
            tensors = {"weight": codes, "weight_scale": params.scale.reshape(())}
        else:
            tensors = {
                "weight": pack(codes, 4, dtype=torch.uint8),
                "weight_scale": params.scale,
                "weight_scale_2": params.global_scale.reshape(()),
            }
        if quantized.inputs is not None:
            tensors["input_scale"] = quantized.inputs.scale.reshape(())
        if quantized.outputs is not None:
            tensors[_kv_scale(layer)] = quantized.outputs.scale.reshape(())
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        """Raises ModelError ``nonfinite_weights`` for a scale that is NaN or infinite."""
        from quantcore.formats.floats import decode_e8m0
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QLayer, QTensor

        def params(part: str) -> QParams:
            return QParams(_scale(layer, part, tensors).reshape(1, 1))

        codes, inputs, outputs = tensors["weight"], layer.input_tensors, layer.config.output_tensors
        if _is_nvfp4(layer.weight):
            global_scale = _scale(layer, "weight_scale_2", tensors).reshape(())
            codes = unpack(codes, layer.weight.format)
            of_weight = QParams(_scale(layer, "weight_scale", tensors), global_scale=global_scale)
        elif _is_mxfp8(layer.weight):
            of_weight = QParams(finite(layer, "weight_scale", decode_e8m0(tensors["weight_scale"])))
        else:
            of_weight = params("weight_scale")
        of_inputs = params("input_scale") if inputs is not None and _has_input_scale(layer) else None
        if of_inputs is not None and _is_nvfp4(layer.weight):
            of_inputs = QParams(of_inputs.scale.reshape(()))
        return QLayer(
            QTensor(codes, of_weight, layer.weight), of_inputs, None if outputs is None else params(_kv_scale(layer))
        )

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        algorithms = {layer.name: _algorithm(layer) for layer in layers}
        by_algorithm: dict[str, list[str]] = {}
        for name, algorithm in algorithms.items():
            by_algorithm.setdefault(algorithm, []).append(name)
        is_mixed = len(by_algorithm) > 1
        groups = {
            f"group_{index}": {**GROUPS[algorithm], "targets": sorted(names) if is_mixed else ["Linear"]}
            for index, (algorithm, names) in enumerate(by_algorithm.items())
        }
        has_cache = any(layer.config.output_tensors is not None for layer in layers)
        return {
            "config_groups": groups,
            **({"quantized_layers": {name: _described(algorithms[name]) for name in algorithms}} if is_mixed else {}),
            "ignore": [*kept, *(f"*{part}.*" for part in kept_drafts(layers, kept))],
            "quant_algo": MIXED if is_mixed else next(iter(by_algorithm)),
            **({"kv_cache_scheme": FP8_NUMBERS} if has_cache else {}),
            "producer": PRODUCER,
            "quant_method": METHOD,
        }

    def own_files(self, quantization_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        algorithm = quantization_config["quant_algo"]
        of_layers = (
            {"quant_algo": MIXED, "quantized_layers": quantization_config["quantized_layers"]}
            if algorithm == MIXED
            else _described(algorithm)
        )
        cache = "FP8" if "kv_cache_scheme" in quantization_config else None
        described = {**of_layers, "kv_cache_quant_algo": cache, "exclude_modules": quantization_config["ignore"]}
        return {OWN_FILE: {"producer": PRODUCER, "quantization": described}}

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == METHOD

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        described = quantization_config.get("quantization", quantization_config)
        algorithms = _algorithms(described, files)
        with_inputs = {algorithm for name, algorithm in algorithms.items() if f"{name}.input_scale" in files.tensors}
        has_fp8_cache = _has_fp8_cache(described)
        return {
            name: _stored_layer(name, algorithm, files, has_inputs=algorithm in with_inputs, has_cache=has_fp8_cache)
            for name, algorithm in algorithms.items()
        }

    def load_hint(self, path: str) -> str:
        return f"from vllm import LLM\nllm = LLM({path!r})"


def own_description(folder: Path) -> dict[str, Any] | None:
    """Return the ``quantization_config`` that stands in ModelOpt's own file only, as before ModelOpt 0.35, or None."""
    if not (folder / OWN_FILE).exists():
        return None
    return {**read_json(folder / OWN_FILE, "invalid_quantization_config"), "quant_method": METHOD}


def _described(algorithm: str) -> dict[str, Any]:
    size = GROUP_SIZES.get(algorithm)
    return {"quant_algo": algorithm, **({} if size is None else {"group_size": size})}


def _algorithm(layer: LayerPlan) -> str:
    if not _is_nvfp4(layer.weight):
        return "MXFP8" if _is_mxfp8(layer.weight) else "FP8"
    return "W4A16_NVFP4" if layer.input_tensors is None else "NVFP4"


def _is_nvfp4(spec: QuantizationSpec) -> bool:
    return (spec.dtype, spec.scale_type, spec.group_size) == (Dtype.fp4, ScaleType.e4m3, GROUP_SIZE)


def _is_mxfp8(spec: QuantizationSpec) -> bool:
    return (spec.dtype, spec.scale_type, spec.group_size) == (Dtype.fp8_e4m3, ScaleType.e8m0, MX_GROUP_SIZE)


def _has_input_scale(layer: LayerPlan) -> bool:
    """Return True if the inputs have a scale in the files: those of MXFP8 get theirs at run time."""
    return layer.input_tensors is not None and not _is_mxfp8(layer.input_tensors)


def _kv_scale(layer: LayerPlan) -> str:
    return CACHE_SCALES[layer.name.rpartition(".")[2]]


def _scale(layer: LayerPlan, part: str, tensors: Tensors) -> torch.Tensor:
    return finite(layer, part, tensors[part].float())


def _algorithms(described: Mapping[str, Any], files: StoredFiles) -> dict[str, str]:
    """Return the algorithm of each layer with codes. Raises ModelError for one that is not supported."""
    algorithm = _supported(described.get("quant_algo"), (*GROUPS, MIXED))
    names = files.modules_with("weight_scale")
    parts = {f"{name}.{part}" for name in names for part in ("weight", "weight_scale")}
    for name, tensor in files.tensors.items():
        if tensor.dtype in ("U8", "F8_E4M3") and name not in parts:
            raise not_held(f"{name} holds codes, but there is no {name}_scale")
    if algorithm != MIXED:
        return dict.fromkeys(names, algorithm)
    listed = {key: _supported(entry["quant_algo"], GROUPS) for key, entry in described["quantized_layers"].items()}
    found = {name: _listed_name(name, listed) for name in names}
    if missing := next((name for name, key in found.items() if key is None), None):
        raise not_held(f"there is {missing}.weight_scale, but quantized_layers does not name {missing}")
    if idle := next((key for key in listed if key not in found.values()), None):
        raise not_held(f"quantized_layers names {idle}, but there is no {idle}.weight_scale")
    return {name: listed[key] for name, key in found.items() if key is not None}


def _listed_name(name: str, listed: Mapping[str, str]) -> str | None:
    """Return the entry for the layer ``name``: its own, or that of the closest module it lies in."""
    while name and name not in listed:
        name = name.rpartition(".")[0]
    return name or None


def _supported(algorithm: object, supported: Mapping[str, Any] | tuple[str, ...]) -> str:
    name = str(algorithm).upper()
    if name not in supported:
        raise ModelError(
            f"The model is already quantized by ModelOpt, with the algorithm '{algorithm}'.",
            code="already_quantized",
            hint=f"Provide the float model it was made from. Of ModelOpt's algorithms, {', '.join(supported)} can be "
            "read.",
        )
    return name


def _has_fp8_cache(described: Mapping[str, Any]) -> bool:
    cache = described.get("kv_cache_scheme") or described.get("kv_cache_quant_algo")
    if isinstance(cache, Mapping):
        return (cache.get("type"), cache.get("num_bits")) == ("float", 8)
    return str(cache).upper() == "FP8"


def _stored_layer(name: str, algorithm: str, files: StoredFiles, *, has_inputs: bool, has_cache: bool) -> StoredLayer:
    """Describe a layer. Without an ``input_scale`` in any layer of the algorithm, inputs are not quantized."""
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    out_features, width = files.shape(weight)
    if files.tensors[weight].dtype != CODE_DTYPES[algorithm]:
        raise not_held(
            f"{weight} is {files.tensors[weight].dtype}, but codes of {algorithm} are {CODE_DTYPES[algorithm]}"
        )
    if algorithm in ("W4A16_NVFP4", "MXFP8") and has_inputs:
        raise not_held(f"inputs of {algorithm} have no scale in the files, but there is {name}.input_scale")
    cache = f"{name}.{CACHE_SCALES.get(name.rpartition('.')[2])}"
    if cache in files.tensors and not has_cache:
        raise not_held(f"there is {cache}, but its description does not say that the KV cache is FP8")
    static = QuantizationSpec(dtype=Dtype.fp8_e4m3)
    outputs = files.with_scale(static, cache) if cache in files.tensors else None
    if algorithm == "FP8":
        config = QuantizationConfig(
            weight=files.with_scale(static, scale),
            input_tensors=files.with_scale(static, f"{name}.input_scale") if has_inputs else None,
            output_tensors=outputs,
        )
        return StoredLayer((out_features, width), config)
    in_features, size, dtype = width * (1 + (algorithm != "MXFP8")), GROUP_SIZES[algorithm], SCALES_OF_GROUPS[algorithm]
    groups = (out_features, in_features // size)
    if (files.tensors[scale].dtype, files.shape(scale)) != (dtype, groups):
        found = f"{files.tensors[scale].dtype} {list(files.shape(scale))}"
        raise not_held(f"{scale} is {found}, but groups of {size} have scales of {dtype} {list(groups)}")
    number, scale_type = (Dtype.fp8_e4m3, ScaleType.e8m0) if algorithm == "MXFP8" else (Dtype.fp4, ScaleType.e4m3)
    spec = QuantizationSpec(dtype=number, qscheme=QSchemeType.per_group, group_size=size, scale_type=scale_type)
    inputs = replace(spec, is_dynamic=True) if has_inputs or algorithm == "MXFP8" else None
    return StoredLayer(
        (out_features, in_features), QuantizationConfig(weight=spec, input_tensors=inputs, output_tensors=outputs)
    )


_exporter: Exporter = EXPORTERS.add(METHOD)(ModelOptExporter())
