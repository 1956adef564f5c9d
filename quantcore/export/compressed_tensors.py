"""The compressed-tensors format, which vLLM and Transformers load.

Layout as compressed-tensors 0.20 reads it. Weights: see ``compressed_tensors_weights``. Static inputs: ``input_scale``
[1], ``input_zero_point`` int8 [1]; NVFP4 inputs: ``input_global_scale`` float32 [1], the divisor of their groups'
scales. Scales of the KV cache: ``self_attn.k_scale`` and ``self_attn.v_scale`` [1].
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from quantcore.checkpoint.experts import is_in_stack
from quantcore.checkpoint.layout import TensorLayout
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    learns_from_data,
)
from quantcore.export.compressed_tensors_weights import family_of
from quantcore.export.exporter import (
    EXPORTERS,
    KV_SCALES,
    Exporter,
    Tensors,
    draft_parts,
    draft_pattern,
    draft_patterns,
    is_plain,
    refuse_everywhere,
    stored_scale_dtype,
    tensor_name,
)
from quantcore.export.importer import StoredFiles, StoredLayer, matches, not_held
from quantcore.export.readers import Readers
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    from quantcore.tensors.affine import QParams
    from quantcore.tensors.qtensor import QLayer

SCALE_DTYPES = {ScaleType.e8m0: "torch.uint8", ScaleType.e4m3: "torch.float8_e4m3fn"}
"""Names in config.json for the types of scales that are not ordinary numbers."""
FLOAT_DTYPES = {4: "fp4", 6: "fp6_e2m3", 8: "fp8_e4m3"}
SCHEMES = {
    "tensor": QSchemeType.per_tensor,
    "channel": QSchemeType.per_channel,
    "token": QSchemeType.per_channel,
    "group": QSchemeType.per_group,
    "tensor_group": QSchemeType.per_group,
    "block": QSchemeType.per_block,
}


class CompressedTensorsReaders(Readers):
    def not_in_transformers(self, layers: Sequence[LayerPlan]) -> str | None:
        if any(not layer.weight.symmetric and layer.weight.format.bits < 8 for layer in layers):
            return "Transformers does not read packed zero points of compressed-tensors."
        odd = [layer for layer in layers if is_in_stack(layer.name) and not _is_read_as_expert(layer.weight)]
        if odd:
            return (
                f"Transformers does not decode {odd[0].scheme} experts in compressed-tensors: it fails, or silently "
                "loads wrong weights."
            )
        return None

    def transformers_dtype(self, layers: Sequence[LayerPlan]) -> Literal["float32", "bfloat16"]:
        """It decodes blocks with their own scales to bfloat16, and packed experts to the dtype of their scales."""
        packed = (layer for layer in layers if layer.weight.dtype is Dtype.int4 and is_in_stack(layer.name))
        is_exact = all(is_plain(layer.weight) for layer in layers) and not any(packed)
        return "float32" if is_exact else "bfloat16"

    def needs_bfloat16(self, layers: Sequence[LayerPlan]) -> bool:
        return any(layer.weight.scale_type in (ScaleType.e8m0, ScaleType.e4m3) for layer in layers)


def _is_read_as_expert(weight: QuantizationSpec) -> bool:
    """Return whether Transformers reads an expert with such a weight.

    See ``CompressedTensorsDequantize`` in transformers/integrations/compressed_tensors.py.
    """
    is_mxfp4 = weight.dtype is Dtype.fp4 and weight.scale_type is ScaleType.e8m0
    return is_mxfp4 or (is_plain(weight) and weight.dtype in (Dtype.fp8_e4m3, Dtype.int4) and weight.block_size is None)


class CompressedTensorsExporter:
    name = "compressed_tensors"
    title = "compressed-tensors safetensors (vLLM, Transformers)"
    readers = CompressedTensorsReaders(
        "Transformers + compressed-tensors",
        preference=1,
        in_vllm=True,
        in_transformers=True,
        transformers_package="compressed-tensors",
        stores_each_expert=True,
    )

    def refuse(self, layer: LayerPlan) -> str | None:
        outputs = layer.config.output_tensors
        if reason := refuse_everywhere(layer):
            return reason
        if outputs is not None and (not outputs.symmetric or layer.name.rpartition(".")[2] not in KV_SCALES):
            return f"only outputs of {' and '.join(KV_SCALES)} have a (symmetric) scale"
        return family_of(layer).refuse(layer)

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        inputs, outputs = layer.input_tensors, layer.config.output_tensors
        tensors = family_of(layer).layout(layer, model_dtype)
        if inputs is not None and inputs.is_static:
            tensors["input_scale"] = TensorLayout(stored_scale_dtype(inputs, model_dtype), (1,))
            if not inputs.symmetric:
                tensors["input_zero_point"] = TensorLayout("I8", (1,))
        elif inputs is not None and learns_from_data(inputs):
            tensors["input_global_scale"] = TensorLayout("F32", (1,))
        if outputs is not None:
            tensors[_kv_scale(layer)] = TensorLayout(stored_scale_dtype(outputs, model_dtype), (1,))
        return tensors

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        spec, inputs = layer.input_tensors, quantized.inputs
        tensors = family_of(layer).encode(layer, quantized.weight)
        if spec is not None and spec.is_dynamic and inputs is not None:
            tensors["input_global_scale"] = 1 / inputs.scale.reshape(1)
        elif inputs is not None:
            tensors["input_scale"] = inputs.scale.reshape(1)
            if inputs.zero_point is not None:
                tensors["input_zero_point"] = inputs.zero_point.reshape(1).to(torch.int8)
        if quantized.outputs is not None:
            tensors[_kv_scale(layer)] = quantized.outputs.scale.reshape(1)
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        from quantcore.tensors.affine import QParams
        from quantcore.tensors.qtensor import QLayer

        weight, outputs = family_of(layer).decode(layer, tensors), None
        if layer.config.output_tensors is not None:
            outputs = QParams(tensors[_kv_scale(layer)].float().reshape(1, 1))
        return QLayer(weight, _inputs(tensors), outputs)

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        drafts = draft_parts(layers)
        by_scheme: dict[QuantizationConfig, list[LayerPlan]] = {}
        for layer in layers:
            by_scheme.setdefault(replace(layer.config, output_tensors=None), []).append(layer)
        groups = {
            f"group_{index}": {
                "targets": ["Linear"] if len(by_scheme) == 1 else _target_list(same_scheme, drafts),
                "weights": _args(same_scheme[0].weight, is_input=False),
                "input_activations": _args(same_scheme[0].input_tensors, is_input=True),
                "output_activations": None,
                "format": family_of(same_scheme[0]).format_name(same_scheme[0]),
            }
            for index, same_scheme in enumerate(by_scheme.values())
        }
        formats = {str(group["format"]) for group in groups.values()}
        cache = next((layer.config.output_tensors for layer in layers if layer.config.output_tensors is not None), None)
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*kept, *(f"re:{pattern}" for pattern in draft_patterns(layers, kept))],
            "kv_cache_scheme": _args(cache, is_input=True),
        }

    def matches(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "compressed-tensors"

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        return {name: _stored_layer(name, quantization_config, files) for name in files.modules_with("weight_scale")}

    def load_hint(self, path: str) -> str:
        return f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained({path!r})"


def _target_list(layers: Sequence[LayerPlan], drafts: Mapping[str, LayerPlan]) -> list[str]:
    """Return the names of ``layers``, and patterns of the ``drafts`` among them (see ``draft_patterns``)."""
    own = [part for part, layer in drafts.items() if layer in layers]
    return [*(layer.name for layer in layers), *(f"re:{draft_pattern(part)}" for part in own)]


def _kv_scale(layer: LayerPlan) -> str:
    return KV_SCALES[layer.name.rpartition(".")[2]]


def _inputs(tensors: Tensors) -> QParams | None:
    """Read the calibrated parameters of the inputs."""
    import torch

    from quantcore.tensors.affine import QParams

    if "input_global_scale" in tensors:
        return QParams(1 / tensors["input_global_scale"].reshape(()))
    if "input_scale" not in tensors:
        return None
    zero_point = tensors.get("input_zero_point")
    zero_point = None if zero_point is None else zero_point.to(torch.int32).reshape(1, 1)
    return QParams(tensors["input_scale"].float().reshape(1, 1), zero_point)


def _args(spec: QuantizationSpec | None, *, is_input: bool) -> dict[str, Any] | None:
    """Return the QuantizationArgs of compressed-tensors for one tensor."""
    if spec is None:
        return None
    has_global_scale = spec.scale_type is ScaleType.e4m3
    whole_row = spec.group_size == -1
    strategy = {
        QSchemeType.per_tensor: "tensor",
        QSchemeType.per_channel: "token" if is_input else "channel",
        QSchemeType.per_group: "channel" if whole_row else "tensor_group" if has_global_scale else "group",
        QSchemeType.per_block: "block",
    }
    args = {
        "num_bits": spec.format.bits,
        "type": "int" if isinstance(spec.format, IntFormat) else "float",
        "strategy": strategy[spec.qscheme],
        "group_size": None if whole_row else spec.group_size,
        "symmetric": spec.symmetric,
        "dynamic": "local" if spec.is_dynamic and has_global_scale else spec.is_dynamic,
        "observer": "minmax" if spec.is_static or has_global_scale else None,
        "actorder": None,
        "block_structure": spec.block_size and list(spec.block_size),
    }
    return args | ({"scale_dtype": SCALE_DTYPES[spec.scale_type]} if spec.scale_type in SCALE_DTYPES else {})


def _stored_layer(name: str, quantization_config: Mapping[str, Any], files: StoredFiles) -> StoredLayer:
    groups = [
        group
        for group in quantization_config["config_groups"].values()
        if any(_targets(target, name) for target in group["targets"])
    ]
    if not groups:
        raise not_held(f"no group of its quantization_config matches {name}")
    if f"{name}.weight_g_idx" in files.tensors:
        raise not_held(f"the groups of {name} are spread over its inputs (actorder group)")
    weight = _spec(groups[0]["weights"], f"{name}.weight_scale", files)
    if f"{name}.weight_shape" in files.tensors:
        shape = tuple(array("q", files.read_bytes(f"{name}.weight_shape")))
    elif f"{name}.weight_packed" in files.tensors:
        rows, num_bytes = files.shape(f"{name}.weight_packed")
        shape = (rows, num_bytes * 8 // int(groups[0]["weights"]["num_bits"]))
    else:
        shape = files.shape(f"{name}.weight")
    output = KV_SCALES.get(name.rpartition(".")[2])
    cache, kv_cache_scheme = tensor_name(name, output) if output else "", quantization_config.get("kv_cache_scheme")
    config = QuantizationConfig(
        weight=weight,
        input_tensors=_spec(groups[0].get("input_activations"), f"{name}.input_scale", files),
        output_tensors=_spec(kv_cache_scheme, cache, files) if cache in files.tensors else None,
    )
    return StoredLayer(shape, config)


def _targets(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return matches(target.removeprefix("re:"), name)
    return target in ("Linear", name)


def _spec(args: Mapping[str, Any] | None, scale: str, files: StoredFiles) -> QuantizationSpec | None:
    """Return the inverse of ``_args``; ``scale`` is the name of the tensor that holds a static scale."""
    if args is None:
        return None
    bits, kind, strategy = args["num_bits"], args["type"], args["strategy"]
    symmetric, is_dynamic = bool(args["symmetric"]), bool(args.get("dynamic"))
    dtype = (
        FLOAT_DTYPES.get(bits, "")
        if kind == "float"
        else f"int{bits}"
        if symmetric or bits in (3, 8)
        else f"uint{bits}"
    )
    if strategy not in SCHEMES or not dtype:
        raise not_held(f"{kind} of {bits} bits with strategy {strategy}")
    in_blocks = _scale_type(args, scale, files)
    spec = QuantizationSpec(
        dtype=Dtype(dtype),
        qscheme=SCHEMES[strategy],
        symmetric=symmetric,
        is_dynamic=is_dynamic,
        group_size=args["group_size"] if strategy in ("group", "tensor_group") else None,
        block_size=tuple(args["block_structure"]) if strategy == "block" else None,
        scale_type=ScaleType.float if in_blocks is None else in_blocks,
    )
    return spec if is_dynamic or in_blocks is not None else files.with_scale(spec, scale)


def _scale_type(args: Mapping[str, Any], scale: str, files: StoredFiles) -> ScaleType | None:
    """Return the type of scales that are not ordinary floats, else None.

    Some writers show it only by the dtype of the tensor.
    """
    if args["strategy"] == "tensor_group" or args.get("scale_dtype") == SCALE_DTYPES[ScaleType.e4m3]:
        return ScaleType.e4m3
    is_byte = scale in files.tensors and files.tensors[scale].dtype == "U8"
    return ScaleType.e8m0 if is_byte or args.get("scale_dtype") == SCALE_DTYPES[ScaleType.e8m0] else None


_exporter: Exporter = EXPORTERS.add("compressed_tensors")(CompressedTensorsExporter())
