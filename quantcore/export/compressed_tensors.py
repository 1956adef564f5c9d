"""The compressed-tensors format, which vLLM and Transformers load.

Layout as compressed-tensors 0.20 reads it. 8-bit (``int-quantized``, ``float-quantized``): weight [out, in],
``weight_scale`` [out, 1] or [1], static ``input_scale`` [1]. Weight-only integers (``pack-quantized``): int32 words
[out, in / slots], code i at bits [i * bits, ...), codes shifted to start at 0; zero points packed along the output.
Scales of the KV cache: ``self_attn.k_scale`` and ``self_attn.v_scale`` [1].
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.layout import TensorLayout
from quantcore.config import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.export.exporter import (
    EXPORTERS,
    KV_SCALES,
    Exporter,
    Tensors,
    is_plain,
    refuse_everywhere,
    refuse_inputs,
    stored_scale_dtype,
    tensor_name,
)
from quantcore.export.stored import StoredFiles, StoredLayer, matches, not_held
from quantcore.export.words import codes_of, pack_from_zero, unpack_from_zero
from quantcore.formats import IntFormat
from quantcore.layer import LayerPlan

if TYPE_CHECKING:
    from quantcore.qtensor import QLayer


class CompressedTensorsExporter:
    name = "compressed_tensors"
    title = "compressed-tensors safetensors (vLLM, Transformers)"

    def refuse(self, layer: LayerPlan) -> str | None:
        weight, inputs = layer.weight, layer.input_tensors
        if reason := refuse_everywhere(layer):
            return reason
        if weight.dtype not in (Dtype.int4, Dtype.uint4, Dtype.int8, Dtype.fp8_e4m3) or not is_plain(weight):
            return "its consumers read int4, uint4, int8 and fp8_e4m3 with plain scales"
        outputs = layer.config.output_tensors
        if outputs is not None and (not outputs.symmetric or layer.name.rpartition(".")[2] not in KV_SCALES):
            return f"only outputs of {' and '.join(KV_SCALES)} have a scale, a symmetric one"
        if weight.format.bits < 8 and inputs is not None:
            return "4-bit weights go with unquantized inputs"
        if not _is_packed(layer):
            if weight.qscheme not in (QSchemeType.per_tensor, QSchemeType.per_channel):
                return "weights of layers with quantized inputs can be per_tensor or per_channel"
            if not weight.symmetric:
                return "weights of layers with quantized inputs must be symmetric"
            return refuse_inputs(weight, inputs)
        slots = 32 // weight.format.bits
        if weight.qscheme is QSchemeType.per_tensor:
            return "weight-only integers can be per_channel or per_group"
        if layer.in_features % slots:
            return f"it packs {slots} inputs in a word, and {layer.in_features} is not a multiple"
        if not weight.symmetric and layer.out_features % slots:
            return f"it packs {slots} zero points in a word, and {layer.out_features} rows are not a multiple"
        return None

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        inputs, outputs = layer.input_tensors, layer.config.output_tensors
        tensors = self._packed_layout(layer, model_dtype) if _is_packed(layer) else self._layout(layer, model_dtype)
        if inputs is not None and inputs.is_static:
            tensors["input_scale"] = TensorLayout(stored_scale_dtype(inputs, model_dtype), (1,))
            if not inputs.symmetric:
                tensors["input_zero_point"] = TensorLayout("I8", (1,))
        if outputs is not None:
            tensors[_kv_scale(layer)] = TensorLayout(stored_scale_dtype(outputs, model_dtype), (1,))
        return tensors

    @staticmethod
    def _packed_layout(layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec, (rows, groups) = layer.weight, layer.num_scales
        slots = 32 // spec.format.bits
        tensors = {
            "weight_packed": TensorLayout("I32", (layer.out_features, layer.in_features // slots)),
            "weight_scale": TensorLayout(stored_scale_dtype(spec, model_dtype), (rows, groups)),
            "weight_shape": TensorLayout("I64", (2,)),
        }
        if not spec.symmetric:
            tensors["weight_zero_point"] = TensorLayout("I32", (rows // slots, groups))
        return tensors

    @staticmethod
    def _layout(layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        spec, (rows, _) = layer.weight, layer.num_scales
        shape = (1,) if spec.qscheme is QSchemeType.per_tensor else (rows, 1)
        dtype = "I8" if isinstance(spec.format, IntFormat) else "F8_E4M3"
        scale = TensorLayout(stored_scale_dtype(spec, model_dtype), shape)
        return {"weight": TensorLayout(dtype, layer.shape), "weight_scale": scale}

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        import torch

        weight, inputs, fmt = quantized.weight, quantized.inputs, layer.weight.format
        params = weight.params
        if _is_packed(layer):
            tensors = {
                "weight_packed": pack_from_zero(weight.codes, fmt),
                "weight_scale": params.scale,
                "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
            }
            if params.zero_point is not None:
                tensors["weight_zero_point"] = pack_from_zero(params.zero_point.T, fmt).T
        else:
            shape = self.layout(layer, "F32")["weight_scale"].shape
            tensors = {"weight": weight.codes, "weight_scale": params.scale.reshape(shape)}
        if inputs is not None:
            tensors["input_scale"] = inputs.scale.reshape(1)
            if inputs.zero_point is not None:
                tensors["input_zero_point"] = inputs.zero_point.reshape(1).to(torch.int8)
        if quantized.outputs is not None:
            tensors[_kv_scale(layer)] = quantized.outputs.scale.reshape(1)
        return tensors

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        import torch

        from quantcore.affine import QParams
        from quantcore.qtensor import QLayer, QTensor

        fmt = layer.weight.format
        zero_point = None
        if _is_packed(layer):
            codes = codes_of(tensors["weight_packed"], fmt)
            if not layer.weight.symmetric:
                zero_point = unpack_from_zero(tensors["weight_zero_point"].T, fmt).T
        else:
            codes = tensors["weight"]
        params = QParams(tensors["weight_scale"].float().reshape(layer.num_scales), zero_point)

        def static(scale: str, zero_point: str) -> QParams | None:
            if scale not in tensors:
                return None
            found = tensors.get(zero_point)
            zero = None if found is None else found.to(torch.int32).reshape(1, 1)
            return QParams(tensors[scale].float().reshape(1, 1), zero)

        outputs = static(_kv_scale(layer), "") if layer.config.output_tensors is not None else None
        return QLayer(QTensor(codes, params, layer.weight), static("input_scale", "input_zero_point"), outputs)

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        by_scheme: dict[QuantizationConfig, list[LayerPlan]] = {}
        for layer in layers:
            by_scheme.setdefault(replace(layer.config, output_tensors=None), []).append(layer)
        groups = {
            f"group_{index}": {
                "targets": ["Linear"] if len(by_scheme) == 1 else [layer.name for layer in members],
                "weights": _args(members[0].weight, is_input=False),
                "input_activations": _args(members[0].input_tensors, is_input=True),
                "output_activations": None,
                "format": _format_name(members[0]),
            }
            for index, members in enumerate(by_scheme.values())
        }
        formats = {str(group["format"]) for group in groups.values()}
        cache = next((layer.config.output_tensors for layer in layers if layer.config.output_tensors is not None), None)
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(kept),
            "kv_cache_scheme": _args(cache, is_input=True),
        }

    def knows(self, said: Mapping[str, Any]) -> bool:
        return said.get("quant_method") == "compressed-tensors"

    def find_layers(self, said: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        return {name: _stored_layer(name, said, files) for name in files.modules_with("weight_scale")}

    def load_hint(self, path: str) -> str:
        return f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('{path}')"


def _kv_scale(layer: LayerPlan) -> str:
    return KV_SCALES[layer.name.rpartition(".")[2]]


def _is_packed(layer: LayerPlan) -> bool:
    """Integer weights whose inputs stay in high precision are packed into words."""
    return isinstance(layer.weight.format, IntFormat) and layer.input_tensors is None


def _format_name(layer: LayerPlan) -> str:
    if _is_packed(layer):
        return "pack-quantized"
    return "int-quantized" if isinstance(layer.weight.format, IntFormat) else "float-quantized"


def _args(spec: QuantizationSpec | None, *, is_input: bool) -> dict[str, Any] | None:
    """The QuantizationArgs of compressed-tensors for one tensor."""
    if spec is None:
        return None
    channel = "token" if is_input else "channel"
    strategy = {QSchemeType.per_tensor: "tensor", QSchemeType.per_channel: channel, QSchemeType.per_group: "group"}
    whole_row = spec.group_size == -1
    return {
        "num_bits": spec.format.bits,
        "type": "int" if isinstance(spec.format, IntFormat) else "float",
        "strategy": "channel" if whole_row else strategy[spec.qscheme],
        "group_size": None if whole_row else spec.group_size,
        "symmetric": spec.symmetric,
        "dynamic": spec.is_dynamic,
        "observer": None if spec.is_dynamic else "minmax",
        "actorder": None,
        "block_structure": None,
    }


def _stored_layer(name: str, said: Mapping[str, Any], files: StoredFiles) -> StoredLayer:
    groups = [group for group in said["config_groups"].values() if any(_targets(one, name) for one in group["targets"])]
    if not groups:
        raise not_held(f"no group of its quantization_config is for {name}")
    if f"{name}.weight_g_idx" in files.tensors:
        raise not_held(f"the groups of {name} are spread over its inputs (actorder group)")
    group = groups[0]
    is_packed = f"{name}.weight_packed" in files.tensors
    shape = files.shape(f"{name}.weight_packed" if is_packed else f"{name}.weight")
    if is_packed:
        shape = tuple(array("q", files.read_bytes(f"{name}.weight_shape")))
    inputs = _spec(group.get("input_activations"), f"{name}.input_scale", files)
    output = KV_SCALES.get(name.rpartition(".")[2])
    cache = tensor_name(name, output) if output else ""
    config = QuantizationConfig(
        weight=_spec(group["weights"], f"{name}.weight_scale", files),
        input_tensors=inputs,
        output_tensors=_spec(said.get("kv_cache_scheme"), cache, files) if cache in files.tensors else None,
    )
    return StoredLayer(shape, config)


def _targets(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return matches(target.removeprefix("re:"), name)
    return target in ("Linear", name)


def _spec(args: Mapping[str, Any] | None, scale: str, files: StoredFiles) -> QuantizationSpec | None:
    """The inverse of ``_args``; ``scale`` is the tensor that a static one is stored in."""
    if args is None:
        return None
    bits, kind, strategy = args["num_bits"], args["type"], args["strategy"]
    symmetric, is_dynamic = bool(args["symmetric"]), bool(args.get("dynamic"))
    schemes = {
        "tensor": QSchemeType.per_tensor, "channel": QSchemeType.per_channel, "token": QSchemeType.per_channel,
        "group": QSchemeType.per_group,
    }  # fmt: skip
    dtype = "fp8_e4m3" if kind == "float" else f"int{bits}" if symmetric or bits == 8 else f"uint{bits}"
    if strategy not in schemes or (kind == "float" and bits != 8):
        raise not_held(f"{kind} of {bits} bits with strategy {strategy}")
    spec = QuantizationSpec(
        dtype=Dtype(dtype), qscheme=schemes[strategy], symmetric=symmetric, is_dynamic=is_dynamic,
        group_size=args["group_size"] if strategy == "group" else None,
    )  # fmt: skip
    return spec if is_dynamic else files.with_scale(spec, scale)


_exporter: Exporter = EXPORTERS.add("compressed_tensors")(CompressedTensorsExporter())
