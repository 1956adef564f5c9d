"""Short forms of ``QuantizationSpec``, under the names that AMD Quark gives them: one row of a table each.

``Int4PerGroupSpec(ch_axis=1, group_size=128).to_quantization_spec()`` is the spec with the row's dtype and scheme, the
given fields, and the row's defaults. Two more combine two stages: ``ProgressiveSpec`` and ``ScaleQuantSpec``.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator
from pydantic.dataclasses import dataclass

from quantcore.errors import ConfigError, unknown_value
from quantcore.spec import OBSERVER_METHODS, Dtype, QSchemeType, QuantizationSpec, ScaleMode, ScaleType
from quantcore.values import STRICT, Checked, Value, shown

REQUIRED = MISSING
OBSERVERS = {method: f"PerTensor{part}Observer" for part, method in OBSERVER_METHODS.items()}
SCALE_FORMATS = {"float32": None, "e8m0": ScaleType.e8m0, "e4m3": ScaleType.e4m3}  # None: as scale_type says


@dataclass(frozen=True, config=STRICT)
class DataTypeSpec(Value):
    """A short form. ``FIXED`` is what its name says; its fields are what may still be chosen.

    Those that can be given by position are the ones whose place is the same in all releases of AMD Quark.
    """

    FIXED: ClassVar[dict[str, Any]]

    def to_quantization_spec(self) -> QuantizationSpec:
        """The spec in full. Raises ConfigError for a value that is not allowed."""
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        method, scale_format = given.pop("observer_method", None), given.pop("scale_format", None)
        if method is not None:
            given["observer_cls"] = _look_up("observer_method", str(method).lower(), OBSERVERS)
        if scale_format is not None:
            given["scale_type"] = _look_up("scale_format", scale_format, SCALE_FORMATS) or given["scale_type"]
        return QuantizationSpec(**{**self.FIXED, **given})


def _is_stage(value: object) -> object:
    if not isinstance(value, DataTypeSpec | QuantizationSpec):
        raise ValueError(f"a stage is a QuantizationSpec or a short form of one; {shown(value)} was given")
    return value


Stage = Annotated[DataTypeSpec | QuantizationSpec, PlainValidator(_is_stage)]


@dataclass(frozen=True, config=STRICT)
class TwoStageSpec(Value):
    """Two specs, or short forms of them, that make one."""

    first_stage: Stage
    second_stage: Stage

    def _stages(self) -> tuple[QuantizationSpec, QuantizationSpec]:
        first, second = (
            stage.to_quantization_spec() if isinstance(stage, DataTypeSpec) else stage
            for stage in (self.first_stage, self.second_stage)
        )
        return first, second


class ProgressiveSpec(TwoStageSpec):
    """Quantize, then quantize the codes again: int4 per channel over fp8 per tensor."""

    def to_quantization_spec(self) -> QuantizationSpec:
        """The second stage with the first below it (``over``)."""
        first, second = self._stages()
        return replace(second, over=first)


class ScaleQuantSpec(TwoStageSpec):
    """Quantize in groups, then quantize the scales of the groups to fp8 per tensor (NVFP4)."""

    def to_quantization_spec(self) -> QuantizationSpec:
        """The first stage with ``scale_type`` e4m3. Raises ConfigError for another second stage than fp8 per tensor."""
        first, second = self._stages()
        if second.dtype is not Dtype.fp8_e4m3 or second.qscheme is not QSchemeType.per_tensor:
            raise ConfigError(
                f"The scales cannot be kept as {second.dtype.value} {second.qscheme.value}.",
                code="invalid_config",
                hint="second_stage is FP8E4M3PerTensorSpec(): scales in e4m3 beside one float32 scale for the tensor.",
                field="/second_stage",
            )
        return replace(first, scale_type=ScaleType.e4m3)


def _look_up(what: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise unknown_value(what, name, table, code="invalid_config", field=f"/{what}")
    return table[name]


_COMMON = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False, "observer_method": "min_max"}
_ASYMMETRIC = {"zero_point_type": "int32"}
_SCHEMES: dict[str, dict[str, Any]] = {
    "Tensor": {},
    "Channel": {"ch_axis": REQUIRED},
    "Group": {"ch_axis": REQUIRED, "group_size": REQUIRED},
}
_INTEGERS = {  # are they symmetric if nothing is said, per tensor, channel, group: AMD Quark's defaults, holes filled
    "Int2": (True, True, True),
    "Int3": (True, False, True),
    "Int4": (True, True, True),
    "Int8": (True, False, True),
    "Uint2": (False, False, False),
    "Uint4": (False, False, False),
    "Uint8": (False, False, False),
}
_FLOATS = {"FP8E4M3": Dtype.fp8_e4m3, "FP8E5M2": Dtype.fp8_e5m2}
_SMALL_FLOATS = {"FP4": Dtype.fp4, "FP6E2M3": Dtype.fp6_e2m3, "FP6E3M2": Dtype.fp6_e3m2}
_FLOAT_GROUP = {
    **_SCHEMES["Group"], "scale_format": "float32", "scale_calculation_mode": None, "is_dynamic": True,
    "scale_type": "float", "observer_method": "min_max",
}  # fmt: skip
_MX_ELEMENTS = {**_FLOATS, **_SMALL_FLOATS, "INT8": Dtype.int8}
_MX_OPTIONS = {"ch_axis": REQUIRED, "is_dynamic": True, "scale_calculation_mode": ScaleMode.even.value}
_MX_BLOCK = {"qscheme": QSchemeType.per_group, "group_size": 32, "scale_type": ScaleType.e8m0}


def _table() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> (what the name fixes, what may be chosen: name -> default or REQUIRED)."""
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "Float16Spec": ({"dtype": Dtype.float16}, {}),
        "Bfloat16Spec": ({"dtype": Dtype.bfloat16}, {}),
    }
    for scheme, required in _SCHEMES.items():
        qscheme = QSchemeType(f"per_{scheme.lower()}")
        for prefix, symmetric in _INTEGERS.items():
            default = {"symmetric": symmetric[list(_SCHEMES).index(scheme)]}
            fixed = {"dtype": Dtype(prefix.lower()), "qscheme": qscheme}
            rows[f"{prefix}Per{scheme}Spec"] = fixed, {**required, **default, **_COMMON, **_ASYMMETRIC}
        for prefix, dtype in _FLOATS.items():
            options = _FLOAT_GROUP if scheme == "Group" else {**required, "symmetric": True, **_COMMON}
            rows[f"{prefix}Per{scheme}Spec"] = {"dtype": dtype, "qscheme": qscheme}, options
    for prefix, dtype in _SMALL_FLOATS.items():
        rows[f"{prefix}PerGroupSpec"] = {"dtype": dtype, "qscheme": QSchemeType.per_group}, _FLOAT_GROUP
    for prefix, dtype in _MX_ELEMENTS.items():
        rows[f"OCP_MX{prefix}Spec"] = {"dtype": dtype, **_MX_BLOCK}, _MX_OPTIONS
    return rows


def _short_form(name: str, fixed: dict[str, Any], options: dict[str, Any]) -> type[DataTypeSpec]:
    by_position = ("observer_method",) if fixed.get("qscheme") is QSchemeType.per_tensor else ()
    body: dict[str, Any] = {
        key: field(default=value, kw_only=key not in by_position)
        for key, value in options.items()
        if value is not REQUIRED
    }
    body["FIXED"], body["__module__"], body["__annotations__"] = fixed, __name__, dict.fromkeys(options, Any)
    body["__doc__"] = f"{', '.join(f'{key} {value!s}' for key, value in fixed.items())}."
    plain: Any = Checked(name, (DataTypeSpec,), body)
    made: Any = dataclass(frozen=True, config=STRICT)(plain)
    short_form: type[DataTypeSpec] = made
    return short_form


HELPER_SPECS = {name: _short_form(name, *row) for name, row in _table().items()}


def __getattr__(name: str) -> type[DataTypeSpec]:
    """``specs.Int4PerGroupSpec`` and all the others of ``HELPER_SPECS``."""
    if name not in HELPER_SPECS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return HELPER_SPECS[name]
