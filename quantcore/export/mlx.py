"""The format of Apple's MLX, which mlx-lm loads: ``quantization`` in config.json.

Layout as mlx-lm 0.32 saves it. ``weight`` uint32 [out, in * bits / 32] is a stream of codes, the first one in the
lowest bits, in one of four modes for each layer:

affine   integers of 2, 3, 4, 5, 6 and 8 bits from 0 in groups of 32, 64 or 128. ``scales`` and ``biases``
         [out, in / group] in the model's dtype: a value is code * scale + bias
mxfp4    fp4 in groups of 32; ``scales`` uint8 [out, in / 32], a byte of e8m0
mxfp8    fp8_e4m3 in groups of 32; ``scales`` as in mxfp4
nvfp4    fp4 in groups of 16; ``scales`` uint8, a byte of e4m3, without a scale above them. It is only read, with 1 as
         that scale

A bias is the value of the smallest code. Symmetric weights have one that is exact in every dtype, since it is a scale
times a power of two. Whole zero points do not: ``adapt`` replaces them by real ones, whose biases are rounded before
any code is chosen. ``quantization_config`` says the same as ``quantization``, and which layers are symmetric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.experts import EXPERT
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.switched_experts import stack_experts, stack_of
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import (
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    ZeroPointType,
)
from quantcore.errors import ConfigError, ModelError, NumericsError
from quantcore.export.exporter import (
    EXPORTERS,
    Exporter,
    Tensors,
    refuse_activations,
    refuse_everywhere,
    stored_scale_dtype,
)
from quantcore.export.importer import SCALE_TYPES, StoredFiles, StoredLayer, finite, not_held
from quantcore.export.mlx_models import earlier_names, takes_stacks, why_not_loaded
from quantcore.export.readers import Readers
from quantcore.export.words import WORD_BITS, codes_of, pack_from_zero
from quantcore.formats import IntFormat

if TYPE_CHECKING:
    import torch

    from quantcore.tensors.affine import QParams
    from quantcore.tensors.qtensor import QLayer

METHOD = "mlx"
KEY = "quantization"
"""The key of config.json that mlx-lm reads."""
AFFINE = "affine"
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
FLOAT_MODES = {
    (Dtype.fp4, ScaleType.e8m0, 32): "mxfp4",
    (Dtype.fp8_e4m3, ScaleType.e8m0, 32): "mxfp8",
    (Dtype.fp4, ScaleType.e4m3, 16): "nvfp4",
}
"""The mode of each combination of codes, scales and group size that is not affine."""
READ_ONLY = "nvfp4"
CODES = {2: Dtype.uint2, 3: Dtype.int3, 4: Dtype.uint4, 5: Dtype.uint5, 6: Dtype.int6, 8: Dtype.uint8}
"""The dtype of asymmetric codes of so many bits."""
SYMMETRIC_CODES = {bits: Dtype(f"int{bits}") for bits in BITS}
OURS = ("quant_method", "symmetric")
"""The settings of ``quantization_config`` that are our own: mlx-lm does not know them."""


class MlxExporter:
    name = METHOD
    title = "MLX safetensors (mlx-lm)"
    readers = Readers("mlx-lm", preference=9, for_transformers=False)

    def refuse(self, layer: LayerPlan) -> str | None:
        weight = _fitted(layer).weight
        if reason := refuse_everywhere(layer, real_zero_points=True, embeddings=True) or refuse_activations(layer):
            return reason
        if layer.is_in_tower or layer.is_in_draft:
            return "mlx-lm reads only the language model, without towers and draft heads"
        mode = _mode(weight)
        if mode == READ_ONLY:
            return "MLX's nvfp4 has no scale above the scales of groups, which NVFP4 needs here; use mxfp4"
        if mode is not None:
            return None
        if not isinstance(weight.format, IntFormat) or weight.format.bits not in BITS or weight.over is not None:
            return f"it stores integers of {_listed(BITS)} bits, MXFP4 and MXFP8"
        if weight.scale_type is not ScaleType.float:
            return "scales are numbers in the model's own dtype: set scale_type float"
        if weight.qscheme is not QSchemeType.per_group or layer.group_size not in GROUP_SIZES:
            return f"weights have groups of {_listed(GROUP_SIZES)} inputs: qscheme per_group with such a group_size"
        return None

    def adapt(self, layers: tuple[LayerPlan, ...]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
        """Choose real zero points in place of whole ones: their biases can be stored."""
        fitted = tuple(map(_fitted, layers))
        num_changed = sum(old != new for old, new in zip(layers, fitted, strict=True))
        warning = (
            f"mlx stores zero points as biases in the model's dtype, so {num_changed} layer(s) use zero_point_type "
            "float32."
        )
        return fitted, (warning,) if num_changed else ()

    def check(self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]) -> None:
        """Raise ConfigError for a model that mlx-lm does not load, and for experts of one stack that differ."""
        if reason := why_not_loaded(model_config, layouts):
            raise ConfigError(
                f"The mlx format cannot store this model: {reason}.",
                code="incompatible_export",
                hint="Choose another format, such as gguf.",
                field="/export",
            )
        first: dict[str, tuple[str, TensorLayout | None]] = {}
        for name in layouts:
            match = EXPERT.match(name)
            if match is None or not name.endswith(".weight"):
                continue
            stack = f"{match['moe']}.experts.*.{match['projection']}"
            scales = layouts.get(f"{name.removesuffix('weight')}scales")
            other, expected = first.setdefault(stack, (name, scales))
            if (scales, layouts[name]) != (expected, layouts[other]):
                raise ConfigError(
                    f"mlx-lm stacks the experts of a layer, but {other} and {name} are quantized differently.",
                    code="incompatible_export",
                    hint="Give all experts of a layer one scheme, or exclude all of them.",
                    field="/layer_quant_config",
                )

    def stacked(
        self, model_config: Mapping[str, Any], layouts: Mapping[str, TensorLayout]
    ) -> tuple[dict[str, TensorLayout], dict[str, TensorHeader]]:
        """Stack the experts, unless mlx-lm does so when it loads them."""
        return stack_experts(layouts) if takes_stacks(model_config) else (dict(layouts), {})

    def layout(self, layer: LayerPlan, model_dtype: str) -> dict[str, TensorLayout]:
        words = layer.in_features * layer.weight.format.bits // WORD_BITS
        weight = TensorLayout("U32", (layer.out_features, words))
        if _mode(layer.weight) is not None:
            return {"weight": weight, "scales": TensorLayout("U8", layer.num_scales)}
        of_group = TensorLayout(stored_scale_dtype(layer.weight, model_dtype), layer.num_scales)
        return {"weight": weight, "scales": of_group, "biases": of_group}

    def encode(self, layer: LayerPlan, quantized: QLayer, model_dtype: str) -> Tensors:
        """Raises NumericsError for a bias beyond the range of the model's dtype."""
        import torch

        from quantcore.formats.floats import encode_e8m0
        from quantcore.tensors.affine import minimum_of
        from quantcore.tensors.packing import pack
        from quantcore.tensors.source import TORCH_DTYPES

        codes, params, spec = quantized.weight.codes, quantized.weight.params, layer.weight
        if _mode(spec) is not None:
            words = pack(codes.view(torch.uint8), spec.format.bits)
            return {"weight": words.view(torch.uint32), "scales": encode_e8m0(params.scale)}
        bias = minimum_of(params.zero_point_or_zeros, params.scale, spec)
        bias = bias.to(TORCH_DTYPES[stored_scale_dtype(spec, model_dtype)])
        if not bias.isfinite().all():
            raise NumericsError(
                f"A bias of {layer.name} is beyond the range of the model's dtype, {model_dtype}.",
                code="nonfinite_weights",
                hint="Exclude the layer, or choose a format without biases, such as gptq.",
            )
        return {"weight": pack_from_zero(codes, spec.format).view(torch.uint32), "scales": params.scale, "biases": bias}

    def decode(self, layer: LayerPlan, tensors: Tensors) -> QLayer:
        """Raises ModelError ``nonfinite_weights`` for a scale or bias that is NaN or infinite."""
        import torch

        from quantcore.tensors.affine import QParams, params_of_minimum
        from quantcore.tensors.packing import unpack
        from quantcore.tensors.qtensor import QLayer, QTensor

        spec, words = layer.weight, tensors["weight"].view(torch.int32)
        if _mode(spec) is not None:
            above = torch.ones((), device=words.device) if spec.scale_type is ScaleType.e4m3 else None
            scale = finite(layer, "scales", _decoded_scales(tensors["scales"], spec), "number")
            return QLayer(QTensor(unpack(words, spec.format), QParams(scale, global_scale=above), spec))
        scale = finite(layer, "scales", tensors["scales"].float(), "number")
        bias = finite(layer, "biases", tensors["biases"].float(), "number")
        params = QParams(scale) if spec.symmetric else params_of_minimum(scale, bias, spec)
        if spec.symmetric:
            _check_symmetric(layer, params, bias)
        return QLayer(QTensor(codes_of(words, spec.format), params, spec))

    def quantization_config(
        self, config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return the settings of most layers, then those of others by name; experts have those of their stack."""
        settings = {stack_of(layer.name): _settings(layer) for layer in layers}
        usual = dict(Counter(tuple(own.items()) for own in settings.values()).most_common(1)[0][0])
        others = {name: own for name, own in settings.items() if own != usual}
        return {"quant_method": METHOD, **usual, **others}

    def own_config(self, model_config: Mapping[str, Any], quantization_config: Mapping[str, Any]) -> dict[str, Any]:
        return {**earlier_names(model_config), KEY: _without_ours(quantization_config)}

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Files of mlx-lm itself name no method."""
        return config.get("quant_method") == METHOD or ("quant_method" not in config and "group_size" in config)

    def read_layers(self, quantization_config: Mapping[str, Any], files: StoredFiles) -> dict[str, StoredLayer]:
        return {name: _stored_layer(name, quantization_config, files) for name in files.modules_with("scales")}

    def load_hint(self, path: str) -> str:
        return f"from mlx_lm import load\nmodel, tokenizer = load({path!r})"


def own_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings in config.json that stand only under mlx-lm's name, as in older files, or None."""
    settings = config.get(KEY)
    return settings if isinstance(settings, dict) else None


def _without_ours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what mlx-lm knows of ``settings``: it takes all that belong to a layer for arguments of its class."""
    return {
        name: _without_ours(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in OURS
    }


def _fitted(layer: LayerPlan) -> LayerPlan:
    weight = layer.weight
    if weight.symmetric or weight.zero_point_type is ZeroPointType.float32:
        return layer
    return replace(layer, config=replace(layer.config, weight=replace(weight, zero_point_type=ZeroPointType.float32)))


def _mode(spec: QuantizationSpec) -> str | None:
    """Return the mode of codes that are floats; None for affine ones, and for all that MLX does not have."""
    return FLOAT_MODES.get((spec.dtype, spec.scale_type, spec.group_size or 0))


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}"


def _settings(layer: LayerPlan) -> dict[str, Any]:
    mode = _mode(layer.weight)
    own = {"group_size": layer.group_size, "bits": layer.weight.format.bits, "mode": mode or AFFINE}
    return own if mode is not None else {**own, "symmetric": layer.weight.symmetric}


def _decoded_scales(scales: torch.Tensor, spec: QuantizationSpec) -> torch.Tensor:
    import torch

    from quantcore.formats.floats import decode_e8m0

    return decode_e8m0(scales) if spec.scale_type is ScaleType.e8m0 else scales.view(torch.float8_e4m3fn).float()


def _check_symmetric(layer: LayerPlan, params: QParams, bias: torch.Tensor) -> None:
    if not (bias == params.scale * layer.weight.format.min).all():
        raise ModelError(
            f"'{layer.name}.biases' are not those of symmetric weights, which quantization_config says that they are.",
            code="config_implausible",
            hint="The files and config.json do not match.",
        )


def _stored_layer(name: str, quantization_config: Mapping[str, Any], files: StoredFiles) -> StoredLayer:
    own = quantization_config.get(name) or quantization_config.get(stack_of(name)) or quantization_config
    mode, bits, size = str(own.get("mode", AFFINE)), int(own["bits"]), int(own["group_size"])
    weight = files.shape(f"{name}.weight")
    if len(weight) != 2:
        raise not_held(f"{name} is a stack of experts {list(weight)}, as mlx-lm saves them")
    _check_dtype(f"{name}.weight", ("U32",), files)
    if mode == AFFINE:
        for part in ("scales", "biases"):
            _check_dtype(f"{name}.{part}", tuple(SCALE_TYPES), files)
        spec = files.with_scale(_affine(bits, size, symmetric=own.get("symmetric") is True), f"{name}.scales")
    else:
        _check_dtype(f"{name}.scales", ("U8",), files)
        spec = _floats(mode, bits, size)
    width, rest = divmod(weight[1] * WORD_BITS, bits)
    if rest or width % size:
        raise not_held(f"the codes of {name} do not fill groups of {size} with {bits} bits")
    return StoredLayer((weight[0], width), QuantizationConfig(weight=spec))


def _check_dtype(name: str, allowed: tuple[str, ...], files: StoredFiles) -> None:
    files.shape(name)  # which raises for a tensor that is missing
    dtype = files.tensors[name].dtype
    if dtype not in allowed:
        raise not_held(f"{name} is {dtype}, not {' or '.join(allowed)}")


def _affine(bits: int, size: int, *, symmetric: bool) -> QuantizationSpec:
    if bits not in BITS or size not in GROUP_SIZES:
        raise not_held(
            f"affine codes have {_listed(BITS)} bits in groups of {_listed(GROUP_SIZES)}, not {bits} bits in groups of "
            f"{size}"
        )
    return QuantizationSpec(
        dtype=SYMMETRIC_CODES[bits] if symmetric else CODES[bits],
        qscheme=QSchemeType.per_group,
        group_size=size,
        symmetric=symmetric,
        zero_point_type=ZeroPointType.int32 if symmetric else ZeroPointType.float32,
    )


def _floats(mode: str, bits: int, size: int) -> QuantizationSpec:
    for (dtype, scale_type, group_size), name in FLOAT_MODES.items():
        spec = QuantizationSpec(
            dtype=dtype, qscheme=QSchemeType.per_group, group_size=group_size, ch_axis=-1, scale_type=scale_type
        )
        if (name, spec.format.bits, group_size) == (mode, bits, size):
            return spec
    raise not_held(f"there is no mode {mode!r} with {bits} bits in groups of {size}")


_exporter: Exporter = EXPORTERS.add(METHOD)(MlxExporter())
