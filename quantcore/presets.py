"""Named schemes: a table. A new one is one row."""

from __future__ import annotations

from dataclasses import dataclass

from quantcore.config import Config, Dtype, QSchemeType, QuantizationConfig, QuantizationSpec
from quantcore.errors import ConfigError, unknown_value

Spec = QuantizationSpec
PER_TENSOR, PER_CHANNEL, PER_GROUP = QSchemeType.per_tensor, QSchemeType.per_channel, QSchemeType.per_group

INT8_TENSOR = Spec(dtype=Dtype.int8, qscheme=PER_TENSOR)
INT8_CHANNEL = Spec(dtype=Dtype.int8, qscheme=PER_CHANNEL, ch_axis=0)
INT8_TOKEN = Spec(dtype=Dtype.int8, qscheme=PER_CHANNEL, ch_axis=1, is_dynamic=True, symmetric=False)
FP8_TENSOR = Spec(dtype=Dtype.fp8_e4m3, qscheme=PER_TENSOR)
FP8_CHANNEL = Spec(dtype=Dtype.fp8_e4m3, qscheme=PER_CHANNEL, ch_axis=0)
FP8_TOKEN = Spec(dtype=Dtype.fp8_e4m3, qscheme=PER_CHANNEL, ch_axis=1, is_dynamic=True)
UINT4_GROUP = Spec(dtype=Dtype.uint4, qscheme=PER_GROUP, ch_axis=1, group_size=64, symmetric=False)
INT4_GROUP = Spec(dtype=Dtype.int4, qscheme=PER_GROUP, ch_axis=1, group_size=64)


@dataclass(frozen=True)
class Preset:
    """A scheme with a name. ``aliases`` are the names that the quantization script of AMD Quark gave it."""

    name: str
    title: str
    weight: QuantizationSpec
    input_tensors: QuantizationSpec | None = None
    aliases: tuple[str, ...] = ()

    @property
    def layer_config(self) -> QuantizationConfig:
        return QuantizationConfig(weight=self.weight, input_tensors=self.input_tensors)

    @property
    def config(self) -> Config:
        return Config(global_quant_config=self.layer_config, exclude=("lm_head",))

    @property
    def needs_calibration(self) -> bool:
        return self.layer_config.needs_calibration


_TABLE = (
    Preset(
        "int8_dynamic",
        "int8 weights per channel, asymmetric int8 activations with one scale a token, found at run time",
        INT8_CHANNEL,
        INT8_TOKEN,
    ),
    Preset(
        "int8_static",
        "int8 weights per channel, int8 activations with one calibrated scale a tensor",
        INT8_CHANNEL,
        INT8_TENSOR,
        aliases=("w_int8_per_channel_a_int8_per_tensor_sym",),
    ),
    Preset(
        "int8_weight_only",
        "int8 weights per channel, activations untouched",
        INT8_CHANNEL,
        aliases=("w_int8_per_channel_sym",),
    ),
    Preset(
        "int8_weight_only_per_tensor",
        "int8 weights with one scale a tensor, activations untouched",
        INT8_TENSOR,
        aliases=("w_int8_per_tensor_sym",),
    ),
    Preset(
        "fp8",
        "fp8 (e4m3) weights and activations, one calibrated scale a tensor",
        FP8_TENSOR,
        FP8_TENSOR,
        aliases=("w_fp8_a_fp8",),
    ),
    Preset(
        "fp8_dynamic",
        "fp8 (e4m3) weights per channel, activations per token, found at run time",
        FP8_CHANNEL,
        FP8_TOKEN,
    ),
    Preset(
        "w4a16",
        "uint4 weights in asymmetric groups of 64, activations untouched",
        UINT4_GROUP,
        aliases=("w_uint4_per_group_asym",),
    ),
    Preset(
        "w4a16_sym",
        "int4 weights in symmetric groups of 64, activations untouched",
        INT4_GROUP,
        aliases=("w_int4_per_group_sym",),
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _TABLE}
_BY_ANY_NAME = {name: preset for preset in _TABLE for name in (preset.name, *preset.aliases)}


def resolve(name: str, *, group_size: int | None = None, exclude: tuple[str, ...] | None = None) -> Config:
    """The config that a preset (or one of its aliases) stands for, with the two things people change most.

    Raises ConfigError ``unknown_preset``, or ``invalid_config`` when a group size is given to a scheme without groups.
    """
    if name not in _BY_ANY_NAME:
        raise unknown_value("preset", name, _BY_ANY_NAME, code="unknown_preset", field="/config/preset")
    preset = _BY_ANY_NAME[name]
    layer = preset.layer_config
    if group_size is not None:
        if preset.weight.qscheme is not PER_GROUP:
            grouped = [p.name for p in _TABLE if p.weight.qscheme is PER_GROUP]
            raise ConfigError(
                f"Preset '{preset.name}' has no groups, so group_size {group_size} means nothing there.",
                code="invalid_config",
                hint=f"Leave it out, or take one of: {', '.join(grouped)}.",
                field="/config/group_size",
                allowed=grouped,
            )
        weight = Spec.model_validate({**preset.weight.model_dump(), "group_size": group_size})
        layer = QuantizationConfig(weight=weight, input_tensors=preset.input_tensors)
    return Config(global_quant_config=layer, exclude=("lm_head",) if exclude is None else exclude)
