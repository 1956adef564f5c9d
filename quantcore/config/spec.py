"""The quantization of one tensor: the vocabulary (dtypes, schemes, scales) and the spec made of it. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictInt
from pydantic import model_validator as validator
from pydantic.dataclasses import dataclass

from quantcore.config.values import STRICT, Value, given_fields
from quantcore.formats import FORMATS, Format
from quantcore.registry import plug_ins

SUPER_BLOCK = 256  # inputs under one float16 scale
SCALE_BLOCK = 256  # scales under one float32 number, with double quantization


class Dtype(StrEnum):
    """Number formats that a tensor can be quantized to; ``quantcore.formats`` describes each."""

    int2 = "int2"
    int3 = "int3"
    int4 = "int4"
    int5 = "int5"
    int6 = "int6"
    int8 = "int8"
    int16 = "int16"
    uint2 = "uint2"
    uint4 = "uint4"
    uint5 = "uint5"
    uint8 = "uint8"
    uint16 = "uint16"
    float16 = "float16"
    bfloat16 = "bfloat16"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e4m3fnuz = "fp8_e4m3fnuz"
    fp8_e5m2 = "fp8_e5m2"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    nf4 = "nf4"
    fp4_bnb = "fp4_bnb"
    iq4_nl = "iq4_nl"
    iq1_s = "iq1_s"
    iq1_m = "iq1_m"
    iq2_xxs = "iq2_xxs"
    iq2_xs = "iq2_xs"
    iq2_s = "iq2_s"
    iq3_xxs = "iq3_xxs"
    iq3_s = "iq3_s"
    tq1_0 = "tq1_0"
    tq2_0 = "tq2_0"
    mx = "mx"

    @classmethod
    def _missing_(cls, value: object) -> Dtype | None:
        """Return the dtype of an installed package's format, which becomes a member when it is first named."""
        if not isinstance(value, str) or value not in FORMATS:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        cls._member_map_[value] = cls._value2member_map_[value] = member
        cls._member_names_.append(value)
        return member

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """Return a schema that also names the formats of installed packages."""
        reference: dict[str, Any] = handler(schema)
        names = handler.resolve_ref_schema(reference)
        names["enum"] = list(dict.fromkeys([*names["enum"], *FORMATS]))
        return reference


class QSchemeType(StrEnum):
    """The values that share one scale: the tensor, a channel (or token), a group along one axis, a 2-D block."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"


class ScaleType(StrEnum):
    """The number type of the stored scale.

    ``float`` is the model's own dtype, ``pof2`` a power of two in it, ``e8m0`` a power of two in one byte (OCP MX),
    ``e4m3`` an fp8 number beside one float32 scale for the whole tensor (NVFP4), ``ue4m3`` one by itself (GGUF's
    NVFP4). ``uint4``, ``uint6``, ``int6``
    and ``int8`` are whole numbers in units of one float16 scale per 256 inputs (GGUF's K-types and IQ4_XS; see
    ``super_blocks``); ``odd3`` are 8 odd ones, 1 to 15 (IQ1), and ``odd4`` 16, 1 to 31 (IQ2 and IQ3).
    ``double_quant`` are 8-bit codes of a dynamic map with one float32 factor per 256 scales (bitsandbytes; see
    ``double_quant``).
    """

    float = "float"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    pof2 = "pof2"
    e8m0 = "e8m0"
    e4m3 = "e4m3"
    ue4m3 = "ue4m3"
    uint4 = "uint4"
    uint6 = "uint6"
    odd3 = "odd3"
    odd4 = "odd4"
    int6 = "int6"
    int8 = "int8"
    double_quant = "double_quant"

    @property
    def is_whole(self) -> bool:
        """True if scales are whole numbers in units of their super-block."""
        return self in _IN_SUPER_BLOCKS

    @property
    def in_one_byte(self) -> bool:
        """True if each scale is stored in one byte, as a power of two or as an fp8 number."""
        return self in (ScaleType.e8m0, ScaleType.e4m3, ScaleType.ue4m3)

    @property
    def in_two_levels(self) -> bool:
        """True if scales are encoded together, so that all scales of a weight must be known first."""
        return self.is_whole or self is ScaleType.double_quant


_IN_SUPER_BLOCKS = {
    ScaleType.uint4: ({(Dtype.uint2, 16)}, "uint2 in groups of 16 with zero_point_type float32 (GGUF's Q2_K)"),
    ScaleType.uint6: ({(Dtype.uint4, 32), (Dtype.uint5, 32)},
                      "uint4 and uint5 in groups of 32 with zero_point_type float32 (GGUF's Q4_K and Q5_K)"),
    ScaleType.int6: ({(Dtype.int3, 16), (Dtype.iq4_nl, 32)},
                     "symmetric int3 in groups of 16 (GGUF's Q3_K) and iq4_nl in groups of 32 (IQ4_XS)"),
    ScaleType.odd3: ({(Dtype.iq1_s, 32), (Dtype.iq1_m, 16)},
                     "iq1_s in groups of 32 and iq1_m in groups of 16 (GGUF's types of these names)"),
    ScaleType.odd4: ({(Dtype.iq2_xxs, 32), (Dtype.iq2_xs, 16), (Dtype.iq2_s, 16), (Dtype.iq3_xxs, 32),
                      (Dtype.iq3_s, 32)}, "iq2_xxs, iq3_xxs and iq3_s in groups of 32, iq2_xs and iq2_s in groups of 16"
                     " (GGUF's types of these names)"),
    ScaleType.int8: ({(Dtype.int6, 16)}, "symmetric int6 in groups of 16 (GGUF's Q6_K)"),
}  # fmt: skip
"""The codes and group sizes that have scales of these types, and both in words."""


class ScaleMode(StrEnum):
    """The rule for an e8m0 scale from the largest value of a group (``scale_calculation_mode``).

    ``floor`` is the OCP MX document's rule; ``even`` rounds the largest value to the element's mantissa first, so that
    it clips less; ``ceil`` never clips.
    """

    even = "even"
    floor = "floor"
    ceil = "ceil"


class RoundType(StrEnum):
    """The rounding of integer codes. Float formats always round half to even."""

    round = "round"
    floor = "floor"
    half_even = "half_even"


class ZeroPointType(StrEnum):
    """The type of zero points. ``int32``: a whole code; ``float32``: a real number, so that the range fits exactly."""

    int32 = "int32"
    float32 = "float32"


OBSERVER_METHODS = {"MinMax": "min_max", "Percentile": "percentile", "MSE": "mse", "Histogram": "histogram"}
_GRANULARITY = {
    "per_tensor": "PerTensor",
    "per_channel": "PerChannel",
    "per_group": "PerGroup",
    "per_block": "PerBlock",
}
OBSERVER_NAMES = (
    "PlaceholderObserver",
    "PerBlockMXObserver",
    *(f"{size}{method}Observer" for size in _GRANULARITY.values() for method in OBSERVER_METHODS),
)
OBSERVERS_GROUP = "bitfoundry.observers"


def observer_methods() -> dict[str, str]:
    """Return the method of each part of observer names, such as ``MinMax``; includes installed packages."""
    more = plug_ins(OBSERVERS_GROUP).keys() - {*OBSERVER_METHODS.values(), "placeholder"}
    return OBSERVER_METHODS | {"".join(map(str.capitalize, method.split("_"))): method for method in sorted(more)}


def observer_names() -> tuple[str, ...]:
    """Return the names that ``observer_cls`` accepts."""
    sized = tuple(f"{size}{part}Observer" for size in _GRANULARITY.values() for part in observer_methods())
    return tuple(dict.fromkeys(OBSERVER_NAMES + sized))


def class_name(value: object) -> object:
    """Return ``Linear`` for a class, ``<class 'torch.nn.modules.linear.Linear'>`` or ``nn.Linear``."""
    name = value.__name__ if isinstance(value, type) else value
    return re.sub(r"^<class '(.*)'>$", r"\1", name).rpartition(".")[2] if isinstance(name, str) else name


def one_of(what: str, names: Callable[[], tuple[str, ...]]) -> Any:
    """Return a validator that accepts a class, or its name, if that is one of ``names()``."""

    def check(value: object) -> object:
        name = class_name(value)
        if name not in names():
            raise ValueError(f"{what} {name!r} is unknown; it can be {', '.join(names())}")
        return name

    return BeforeValidator(check)


ObserverName = Annotated[str, one_of("observer", observer_names)]


@dataclass(frozen=True, config=STRICT)
class QuantizationSpec(Value):
    """The quantization of one tensor. The first fields can be given by position, in the order of AMD Quark's class.

    Weights are seen as [out, in, *kernel], in whatever layout the module stores them. ``ch_axis``: the axis of the
    channels (``per_channel``; default 0) or the axis along which groups run (``per_group``; default the inputs). An
    activation [..., tokens, features] that is ``per_channel`` and dynamic has one scale per token; static, with
    ``ch_axis`` -1, one per feature. ``group_size`` -1 is one group as wide as the row. ``over``: a first quantization
    (fp8 per tensor) whose codes this one quantizes again. ``outlier_threshold``: features of a dynamic activation that
    hold a value of this magnitude or more are not quantized (Dettmers et al. 2022, "LLM.int8()"). Defaults:
    ``symmetric`` is True for signed formats, ``observer_cls`` is the min-max observer of the scheme. Only the method
    part of an observer's name counts; ``qscheme`` decides the number of scales.
    """

    dtype: Dtype
    observer_cls: ObserverName | None = None
    is_dynamic: StrictBool | None = None
    qscheme: QSchemeType = QSchemeType.per_tensor
    ch_axis: StrictInt | None = None
    group_size: StrictInt | None = None
    block_size: tuple[StrictInt, StrictInt] | None = Field(default=None, kw_only=True)
    symmetric: StrictBool | None = None
    round_method: RoundType = RoundType.half_even
    scale_type: ScaleType = ScaleType.float
    _: KW_ONLY
    scale_calculation_mode: ScaleMode | None = None
    zero_point_type: ZeroPointType = ZeroPointType.int32
    mx_element_dtype: Dtype | None = Field(
        default=None, description="With dtype mx: element dtype, in groups of 32 with e8m0 scales."
    )
    over: QuantizationSpec | None = None
    outlier_threshold: Annotated[float, Field(gt=0)] | None = None

    @property
    def format(self) -> Format:
        return FORMATS[self.dtype.value]

    @property
    def observer_method(self) -> str:
        """The method: placeholder, min_max, percentile, mse, histogram or that of an installed package."""
        name = str(self.observer_cls)
        return _OTHER_METHODS.get(name) or observer_methods()[_SIZE.sub("", name).removesuffix("Observer")]

    @property
    def is_static(self) -> bool:
        """True if scales must be learned before the spec is used: it is not dynamic, and no plain cast."""
        return self.format.scaled and not self.is_dynamic

    @validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        values = given_fields(values)
        if not isinstance(values, dict):
            return values
        if values.get("dtype") == Dtype.mx:
            values = _mx(values)
        fmt = FORMATS.get(str(values.get("dtype")))
        values.setdefault("symmetric", fmt is None or fmt.signed)
        values.setdefault("is_dynamic", False)
        if values.get("scale_type") == ScaleType.e8m0:
            values.setdefault("scale_calculation_mode", ScaleMode.even)
        values["observer_cls"] = _observer(values, fmt)
        return values

    @validator(mode="after")
    def _make_sense(self) -> Self:
        for wrong, message in (*_scheme_faults(self), *_number_faults(self)):
            if wrong:
                raise ValueError(message)
        return self


_SIZE = re.compile("^Per(Tensor|Channel|Group|Block)")
_OTHER_METHODS = {"PlaceholderObserver": "placeholder", "PerBlockMXObserver": "min_max"}


def _mx(values: dict[str, Any]) -> dict[str, Any]:
    """Replace dtype mx with its element dtype in OCP MX blocks."""
    element = values.get("mx_element_dtype")
    if element is None:
        raise ValueError("dtype mx needs mx_element_dtype: fp8_e4m3, fp8_e5m2, fp6_e3m2, fp6_e2m3, fp4 or int8")
    block = {"qscheme": QSchemeType.per_group, "group_size": 32, "scale_type": ScaleType.e8m0}
    rest = {key: value for key, value in values.items() if key != "mx_element_dtype"}
    return {"ch_axis": -1, **rest, **block, "dtype": element}


def _observer(values: dict[str, Any], fmt: Format | None) -> object:
    """Return the observer of ``values``, by the name that fits the scheme; by default the min-max one."""
    if fmt is not None and not fmt.scaled:
        return values.get("observer_cls", "PlaceholderObserver")
    size = _GRANULARITY.get(str(values.get("qscheme", "per_tensor")), "PerTensor")
    default = "PerBlockMXObserver" if values.get("scale_type") == ScaleType.e8m0 else f"{size}MinMaxObserver"
    name = class_name(values.get("observer_cls", default))
    if name not in observer_names() or name == "PlaceholderObserver":
        return name
    if name == "PerBlockMXObserver":
        return default
    method = _SIZE.sub("", str(name))
    return default if method == "MinMaxObserver" else f"{size}{method}"


def _scheme_faults(spec: QuantizationSpec) -> tuple[tuple[bool, str], ...]:
    """Return the possible faults of the values that share a scale: (is it present, its message)."""
    scheme, size, block = spec.qscheme, spec.group_size, spec.block_size
    is_group, is_block = scheme is QSchemeType.per_group, scheme is QSchemeType.per_block
    return (
        (spec.dtype is Dtype.mx, "mx_element_dtype cannot be mx itself"),
        (spec.mx_element_dtype is not None, "mx_element_dtype is only for dtype mx"),
        (
            is_group and size is None,
            "qscheme per_group needs group_size: a whole number above 0, or -1 for the whole row",
        ),
        (
            size is not None and (size == 0 or size < -1),
            f"group_size is {size}; it must be above 0, or -1 for the whole row",
        ),
        (
            size is not None and not is_group,
            f"group_size is for qscheme per_group, not {scheme.value}; remove it",
        ),
        (is_block and block is None, "qscheme per_block needs block_size: two whole numbers such as [128, 128]"),
        (block is not None and min(block) < 1, f"block_size is {block}; both numbers must be above 0"),
        (
            block is not None and not is_block,
            f"block_size is for qscheme per_block, not {scheme.value}; remove it",
        ),
        (
            spec.ch_axis is not None and not -2 <= spec.ch_axis <= 3,
            f"ch_axis is {spec.ch_axis}; a weight is [out, in, *kernel], so its axes are 0 to 3 (or -1, -2)",
        ),
    )


def _number_faults(spec: QuantizationSpec) -> tuple[tuple[bool, str], ...]:
    """Return the possible faults of codes, scales and zero points: (is it present, its message)."""
    fmt, dtype = spec.format, spec.dtype.value
    two_byte_float = not fmt.scaled
    return (
        (
            two_byte_float and (spec.qscheme is not QSchemeType.per_tensor or spec.scale_type is not ScaleType.float),
            f"{dtype} is a plain cast without scales: remove qscheme, group_size and scale_type",
        ),
        (
            not spec.symmetric and not fmt.zero_point_ok,
            f"symmetric=false needs an integer dtype; {dtype} has no zero point",
        ),
        (
            bool(spec.symmetric) and not fmt.signed,
            f"{dtype} has no negative codes: set symmetric to false or use a signed dtype",
        ),
        (
            bool(spec.symmetric) and spec.zero_point_type is ZeroPointType.float32,
            "zero_point_type float32 needs symmetric=false; symmetric quantization has no zero point",
        ),
        (
            not spec.symmetric and spec.scale_type.in_one_byte,
            f"scale_type {spec.scale_type.value} needs symmetric=true",
        ),
        (
            spec.scale_type is ScaleType.e4m3 and spec.qscheme is not QSchemeType.per_group,
            "scale_type e4m3 needs qscheme per_group (NVFP4: fp4 in groups of 16)",
        ),
        (
            spec.scale_type is ScaleType.ue4m3 and ((dtype, spec.group_size) != ("fp4", 16) or bool(spec.is_dynamic)),
            "scale_type ue4m3 is only for fp4 weights with qscheme per_group and group_size 16 (GGUF's NVFP4)",
        ),
        (
            spec.scale_calculation_mode is not None and spec.scale_type is not ScaleType.e8m0,
            "scale_calculation_mode (even, floor, ceil) needs scale_type e8m0",
        ),
        (
            bool(spec.is_dynamic) and spec.observer_method not in ("min_max", "placeholder"),
            f"observer_cls {spec.observer_cls} needs many batches, which is_dynamic=true never has; use a MinMax "
            "observer or is_dynamic=false",
        ),
        (
            spec.is_static and spec.observer_method == "placeholder",
            f"PlaceholderObserver computes no scale, but static {dtype} needs one: use a MinMax observer",
        ),
        (
            spec.outlier_threshold is not None
            and not (spec.is_dynamic and spec.qscheme is QSchemeType.per_channel and fmt.scaled),
            "outlier_threshold is only for dynamic per_channel (per-token) activations",
        ),
        (
            spec.scale_type.is_whole and not _fits_super_blocks(spec),
            f"scale_type {spec.scale_type} is only for {_IN_SUPER_BLOCKS.get(spec.scale_type, ('', ''))[1]}",
        ),
        (
            spec.format.vectors is not None and spec.scale_type not in (ScaleType.odd3, ScaleType.odd4),
            f"{dtype} is only for weights, with qscheme per_group and scale_type odd{3 if dtype[:3] == 'iq1' else 4}",
        ),
        (
            spec.scale_type is ScaleType.double_quant
            and (
                spec.dtype not in (Dtype.nf4, Dtype.fp4_bnb)
                or spec.qscheme is not QSchemeType.per_group
                or bool(spec.is_dynamic)
            ),
            "scale_type double_quant is only for nf4 and fp4_bnb weights with qscheme per_group",
        ),
        (
            spec.over is not None and not _can_lie_under(spec),
            "over must be a static fp8 per_tensor spec without an over of its own, and the codes symmetric integers",
        ),
    )


def _fits_super_blocks(spec: QuantizationSpec) -> bool:
    if spec.qscheme is not QSchemeType.per_group or spec.is_dynamic or spec.over is not None:
        return False
    fits, _ = _IN_SUPER_BLOCKS[spec.scale_type]
    is_complete = bool(spec.symmetric) or spec.zero_point_type is ZeroPointType.float32
    return (spec.dtype, spec.group_size) in fits and is_complete and spec.symmetric is spec.format.signed


def _can_lie_under(spec: QuantizationSpec) -> bool:
    first = spec.over
    return (
        first is not None
        and first.dtype in (Dtype.fp8_e4m3, Dtype.fp8_e4m3fnuz, Dtype.fp8_e5m2)
        and first.qscheme is QSchemeType.per_tensor
        and not first.is_dynamic
        and first.over is None
        and spec.format.zero_point_ok
        and bool(spec.symmetric)
    )
