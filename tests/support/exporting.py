"""Layers to export: every layer config of the presets and some more, the shapes, and which exporter accepts which."""

from collections.abc import Iterator

import torch

from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import QuantizationConfig, QuantizationSpec, learns_from_data
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.export import EXPORTERS, Container, Fitting
from quantcore.tensors.affine import QParams
from quantcore.tensors.qtensor import QLayer

EXTRA = {
    "int8_weight_only_asym": QuantizationConfig(
        weight=QuantizationSpec(dtype="int8", qscheme="per_channel", symmetric=False)
    ),
    "uint4_whole_row": QuantizationConfig(
        weight=QuantizationSpec(dtype="uint4", qscheme="per_group", group_size=-1, symmetric=False)
    ),
    "int4_per_channel": QuantizationConfig(weight=QuantizationSpec(dtype="int4", qscheme="per_channel")),
    "fp8_weight_only": QuantizationConfig(weight=QuantizationSpec(dtype="fp8_e4m3", qscheme="per_channel")),
    "int8_static_asym_input": QuantizationConfig(
        weight=QuantizationSpec(dtype="int8", qscheme="per_channel"),
        input_tensors=QuantizationSpec(dtype="int8", symmetric=False),
    ),
    "kv_cache_fp8": presets.resolve("fp8", kv_cache="fp8").choose("k_proj", "Linear")[0],
    "int2": QuantizationConfig(weight=QuantizationSpec(dtype="int2", qscheme="per_group", group_size=32)),
    "int3": QuantizationConfig(weight=QuantizationSpec(dtype="int3", qscheme="per_group", group_size=32)),
    "uint2": QuantizationConfig(
        weight=QuantizationSpec(dtype="uint2", qscheme="per_group", group_size=32, symmetric=False)
    ),
    "uint8": QuantizationConfig(
        weight=QuantizationSpec(dtype="uint8", qscheme="per_group", group_size=32, symmetric=False)
    ),
    "fp8_block_weight_only": QuantizationConfig(
        weight=QuantizationSpec(dtype="fp8_e4m3", qscheme="per_block", block_size=(16, 64))
    ),
    "mxfp8_weight_only": QuantizationConfig(weight=presets.PRESETS["mxfp8"].layer_config.weight),
    "float32_scales": QuantizationConfig(
        weight=QuantizationSpec(
            dtype="uint4", qscheme="per_group", group_size=32, symmetric=False, scale_type="float32"
        )
    ),
}
CONFIGS = {**{name: preset.layer_config for name, preset in presets.PRESETS.items()}, **EXTRA}
SHAPES = [(64, 128), (8, 64), (72, 192), (128, 256), (200, 256)]


def static(spec: QuantizationSpec | None) -> QParams | None:
    if spec is None or not learns_from_data(spec):
        return None
    zero_point = None if spec.symmetric else torch.tensor([[-17]], dtype=torch.int32)
    scale = torch.tensor(0.0234375)
    return QParams(scale) if spec.is_dynamic else QParams(scale.reshape(1, 1), zero_point)


def solved(config: QuantizationConfig, shape: tuple[int, int]) -> tuple[LayerPlan, QLayer]:
    layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, shape, config)
    weight = torch.randn(shape, dtype=torch.float32).bfloat16()
    weight[3] = 0  # a dead row
    weight[5, 7] = 30  # an outlier
    quantized = round_to_nearest(weight, layer.weight)
    return layer, QLayer(quantized, static(config.input_tensors), static(config.output_tensors))


def accepting(name: str) -> Iterator[tuple[str, LayerPlan, QLayer]]:
    """Yield the shapes and configs that the exporter takes, so that a refusal is a decision and not a crash."""
    exporter = EXPORTERS.get(name)
    for config_name, config in CONFIGS.items():
        for shape in SHAPES:
            layer = LayerPlan("model.layers.0.self_attn.k_proj", 0, shape, config)
            short = layer.weight.scale_type.is_whole and shape[1] % 256 and not isinstance(exporter, Container)
            if all(length % size == 0 for length, size in layer.groups) and not short and not exporter.refuse(layer):
                if isinstance(exporter, Fitting):
                    config = exporter.adapt((layer,))[0][0].config  # as the plan does
                yield config_name, *solved(config, shape)
