"""Short forms of ``QuantizationSpec``, under the names that AMD Quark gives them.

``Int4PerGroupSpec(ch_axis=1, group_size=128).to_quantization_spec()`` is the spec with the dtype and scheme of the
class's name, the fields given, and the defaults of the class, which are AMD Quark's (with its gaps filled in).
Two classes combine two stages: ``ProgressiveSpec`` and ``ScaleQuantSpec``.
"""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator
from pydantic.dataclasses import dataclass

from quantcore.config.spec import Dtype, QSchemeType, QuantizationSpec, ScaleMode, ScaleType, observer_methods
from quantcore.config.values import STRICT, Value, shown
from quantcore.errors import ConfigError, unknown_value

SCALE_FORMATS = {"float32": None, "e8m0": ScaleType.e8m0, "e4m3": ScaleType.e4m3}  # None: as scale_type says


@dataclass(frozen=True, config=STRICT)
class DataTypeSpec(Value):
    """Base of the short forms. ``FIXED`` holds what the class's name fixes; the fields are free to choose.

    Fields can be given by position if their place is the same in all releases of AMD Quark. ``QuantizationSpec``
    checks the values.
    """

    FIXED: ClassVar[dict[str, Any]]

    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the full spec. Raises ConfigError for a value that is not allowed."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        method, scale_format = values.pop("observer_method", None), values.pop("scale_format", None)
        if method is not None:
            names = {name: f"PerTensor{part}Observer" for part, name in observer_methods().items()}
            values["observer_cls"] = _look_up("observer_method", str(method).lower(), names)
        if scale_format is not None:
            values["scale_type"] = _look_up("scale_format", scale_format, SCALE_FORMATS) or values["scale_type"]
        return QuantizationSpec(**{**self.FIXED, **values})


def _is_stage(value: object) -> object:
    if not isinstance(value, DataTypeSpec | QuantizationSpec):
        raise ValueError(f"a stage is a QuantizationSpec or a short form of one; {shown(value)} was given")
    return value


Stage = Annotated[DataTypeSpec | QuantizationSpec, PlainValidator(_is_stage)]


@dataclass(frozen=True, config=STRICT)
class TwoStageSpec(Value):
    """A pair of specs, or of short forms, that are combined into one spec."""

    first_stage: Stage
    second_stage: Stage

    def _stages(self) -> tuple[QuantizationSpec, QuantizationSpec]:
        first, second = (
            stage.to_quantization_spec() if isinstance(stage, DataTypeSpec) else stage
            for stage in (self.first_stage, self.second_stage)
        )
        return first, second


class ProgressiveSpec(TwoStageSpec):
    """Quantization whose codes are quantized again: int4 per channel over fp8 per tensor."""

    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the second stage with the first below it (``over``)."""
        first, second = self._stages()
        return replace(second, over=first)


class ScaleQuantSpec(TwoStageSpec):
    """Quantization in groups whose scales are quantized to fp8 per tensor (NVFP4)."""

    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the first stage with ``scale_type`` e4m3. Raises ConfigError if the second is not fp8 per tensor."""
        first, second = self._stages()
        if second.dtype is not Dtype.fp8_e4m3 or second.qscheme is not QSchemeType.per_tensor:
            raise ConfigError(
                f"The scales cannot be kept as {second.dtype.value} {second.qscheme.value}.",
                code="invalid_config",
                hint="second_stage is FP8E4M3PerTensorSpec(): e4m3 scales under one float32 scale for the tensor.",
                field="/second_stage",
            )
        return replace(first, scale_type=ScaleType.e4m3)


def _look_up(what: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise unknown_value(what, name, table, code="invalid_config", field=f"/{what}")
    return table[name]


PER_TENSOR = {"qscheme": QSchemeType.per_tensor}
PER_CHANNEL = {"qscheme": QSchemeType.per_channel}
PER_GROUP = {"qscheme": QSchemeType.per_group}
MX_BLOCK = {"qscheme": QSchemeType.per_group, "group_size": 32, "scale_type": ScaleType.e8m0}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _PerTensor(DataTypeSpec):
    symmetric: Any = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: Any = False
    observer_method: Any = field(default="min_max", kw_only=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _PerChannel(DataTypeSpec):
    ch_axis: Any = field(kw_only=False)
    symmetric: Any = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: Any = False
    observer_method: Any = "min_max"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _PerGroup(_PerChannel):
    group_size: Any = field(kw_only=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _IntPerTensor(_PerTensor):
    zero_point_type: Any = "int32"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _IntPerChannel(_PerChannel):
    zero_point_type: Any = "int32"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _IntPerGroup(_PerGroup):
    zero_point_type: Any = "int32"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _AsymmetricPerTensor(_IntPerTensor):
    symmetric: Any = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _AsymmetricPerChannel(_IntPerChannel):
    symmetric: Any = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _AsymmetricPerGroup(_IntPerGroup):
    symmetric: Any = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _FloatPerGroup(DataTypeSpec):
    ch_axis: Any = field(kw_only=False)
    group_size: Any = field(kw_only=False)
    scale_format: Any = "float32"
    scale_calculation_mode: Any = None
    is_dynamic: Any = True
    scale_type: Any = "float"
    observer_method: Any = "min_max"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MX(DataTypeSpec):
    ch_axis: Any = field(kw_only=False)
    is_dynamic: Any = True
    scale_calculation_mode: Any = ScaleMode.even.value


class Float16Spec(DataTypeSpec):
    """A plain cast to float16."""

    FIXED: ClassVar = {"dtype": Dtype.float16}


class Bfloat16Spec(DataTypeSpec):
    """A plain cast to bfloat16."""

    FIXED: ClassVar = {"dtype": Dtype.bfloat16}


class Int2PerTensorSpec(_IntPerTensor):
    """int2 codes with one scale for the tensor; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int2, **PER_TENSOR}


class Int2PerChannelSpec(_IntPerChannel):
    """int2 codes with one scale for each channel; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int2, **PER_CHANNEL}


class Int2PerGroupSpec(_IntPerGroup):
    """int2 codes with one scale for each group; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int2, **PER_GROUP}


class Int3PerTensorSpec(_IntPerTensor):
    """int3 codes with one scale for the tensor; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int3, **PER_TENSOR}


class Int3PerChannelSpec(_AsymmetricPerChannel):
    """int3 codes with one scale for each channel; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int3, **PER_CHANNEL}


class Int3PerGroupSpec(_IntPerGroup):
    """int3 codes with one scale for each group; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int3, **PER_GROUP}


class Int4PerTensorSpec(_IntPerTensor):
    """int4 codes with one scale for the tensor; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int4, **PER_TENSOR}


class Int4PerChannelSpec(_IntPerChannel):
    """int4 codes with one scale for each channel; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int4, **PER_CHANNEL}


class Int4PerGroupSpec(_IntPerGroup):
    """int4 codes with one scale for each group; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int4, **PER_GROUP}


class Int8PerTensorSpec(_IntPerTensor):
    """int8 codes with one scale for the tensor; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int8, **PER_TENSOR}


class Int8PerChannelSpec(_AsymmetricPerChannel):
    """int8 codes with one scale for each channel; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int8, **PER_CHANNEL}


class Int8PerGroupSpec(_IntPerGroup):
    """int8 codes with one scale for each group; symmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.int8, **PER_GROUP}


class Uint2PerTensorSpec(_AsymmetricPerTensor):
    """uint2 codes with one scale for the tensor; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint2, **PER_TENSOR}


class Uint2PerChannelSpec(_AsymmetricPerChannel):
    """uint2 codes with one scale for each channel; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint2, **PER_CHANNEL}


class Uint2PerGroupSpec(_AsymmetricPerGroup):
    """uint2 codes with one scale for each group; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint2, **PER_GROUP}


class Uint4PerTensorSpec(_AsymmetricPerTensor):
    """uint4 codes with one scale for the tensor; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint4, **PER_TENSOR}


class Uint4PerChannelSpec(_AsymmetricPerChannel):
    """uint4 codes with one scale for each channel; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint4, **PER_CHANNEL}


class Uint4PerGroupSpec(_AsymmetricPerGroup):
    """uint4 codes with one scale for each group; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint4, **PER_GROUP}


class Uint8PerTensorSpec(_AsymmetricPerTensor):
    """uint8 codes with one scale for the tensor; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint8, **PER_TENSOR}


class Uint8PerChannelSpec(_AsymmetricPerChannel):
    """uint8 codes with one scale for each channel; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint8, **PER_CHANNEL}


class Uint8PerGroupSpec(_AsymmetricPerGroup):
    """uint8 codes with one scale for each group; asymmetric by default."""

    FIXED: ClassVar = {"dtype": Dtype.uint8, **PER_GROUP}


class FP8E4M3PerTensorSpec(_PerTensor):
    """fp8_e4m3 codes with one scale for the tensor."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e4m3, **PER_TENSOR}


class FP8E4M3PerChannelSpec(_PerChannel):
    """fp8_e4m3 codes with one scale for each channel."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e4m3, **PER_CHANNEL}


class FP8E4M3PerGroupSpec(_FloatPerGroup):
    """fp8_e4m3 codes with one scale for each group."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e4m3, **PER_GROUP}


class FP8E5M2PerTensorSpec(_PerTensor):
    """fp8_e5m2 codes with one scale for the tensor."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e5m2, **PER_TENSOR}


class FP8E5M2PerChannelSpec(_PerChannel):
    """fp8_e5m2 codes with one scale for each channel."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e5m2, **PER_CHANNEL}


class FP8E5M2PerGroupSpec(_FloatPerGroup):
    """fp8_e5m2 codes with one scale for each group."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e5m2, **PER_GROUP}


class FP4PerGroupSpec(_FloatPerGroup):
    """fp4 codes with one scale for each group."""

    FIXED: ClassVar = {"dtype": Dtype.fp4, **PER_GROUP}


class FP6E2M3PerGroupSpec(_FloatPerGroup):
    """fp6_e2m3 codes with one scale for each group."""

    FIXED: ClassVar = {"dtype": Dtype.fp6_e2m3, **PER_GROUP}


class FP6E3M2PerGroupSpec(_FloatPerGroup):
    """fp6_e3m2 codes with one scale for each group."""

    FIXED: ClassVar = {"dtype": Dtype.fp6_e3m2, **PER_GROUP}


class OCP_MXFP8E4M3Spec(_MX):
    """OCP MX: fp8_e4m3 codes with one e8m0 scale for each block of 32."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e4m3, **MX_BLOCK}


class OCP_MXFP8E5M2Spec(_MX):
    """OCP MX: fp8_e5m2 codes with one e8m0 scale for each block of 32."""

    FIXED: ClassVar = {"dtype": Dtype.fp8_e5m2, **MX_BLOCK}


class OCP_MXFP4Spec(_MX):
    """OCP MX: fp4 codes with one e8m0 scale for each block of 32."""

    FIXED: ClassVar = {"dtype": Dtype.fp4, **MX_BLOCK}


class OCP_MXFP6E2M3Spec(_MX):
    """OCP MX: fp6_e2m3 codes with one e8m0 scale for each block of 32."""

    FIXED: ClassVar = {"dtype": Dtype.fp6_e2m3, **MX_BLOCK}


class OCP_MXFP6E3M2Spec(_MX):
    """OCP MX: fp6_e3m2 codes with one e8m0 scale for each block of 32."""

    FIXED: ClassVar = {"dtype": Dtype.fp6_e3m2, **MX_BLOCK}


class OCP_MXINT8Spec(_MX):
    """OCP MX: int8 codes with one e8m0 scale for each block of 32."""

    FIXED: ClassVar = {"dtype": Dtype.int8, **MX_BLOCK}


HELPER_SPECS: dict[str, type[DataTypeSpec]] = {
    name: short_form
    for name, short_form in list(globals().items())
    if name.endswith("Spec") and isinstance(short_form, type) and "FIXED" in vars(short_form)
}
"""The short forms by class name."""
