"""What a user asks for, in the field's names: spec of a tensor, config of a layer, config of a model.

All values are frozen and refuse unknown fields. ``Config.model_dump(mode="json")`` and ``parse_config`` are inverse.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from quantcore.errors import ConfigError
from quantcore.formats import FORMATS, Format


class Dtype(StrEnum):
    """Number formats a tensor can be quantized to; the facts of each are in ``quantcore.formats``."""

    int4 = "int4"
    uint4 = "uint4"
    int8 = "int8"
    fp8_e4m3 = "fp8_e4m3"


class QSchemeType(StrEnum):
    """How many values share one scale: the whole tensor, one output channel (or token), one group of inputs."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"


class ScaleType(StrEnum):
    """The number type of the stored scale; ``float`` means the model's own dtype."""

    float = "float"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class RoundType(StrEnum):
    """How integer codes are rounded. Float formats always round half to even."""

    round = "round"
    floor = "floor"
    half_even = "half_even"


MIN_MAX_OBSERVERS = {
    QSchemeType.per_tensor: "PerTensorMinMaxObserver",
    QSchemeType.per_channel: "PerChannelMinMaxObserver",
    QSchemeType.per_group: "PerGroupMinMaxObserver",
}


def _observer_name(value: object) -> object:
    """Accept an observer class as well as its name."""
    return value.__name__ if isinstance(value, type) else value


ObserverName = Annotated[
    Literal["PerTensorMinMaxObserver", "PerChannelMinMaxObserver", "PerGroupMinMaxObserver"],
    BeforeValidator(_observer_name),
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class QuantizationSpec(_Frozen):
    """How one tensor is quantized.

    ``ch_axis``: a weight [out, in] has its channels on axis 0; an activation [..., tokens, features] that is
    ``per_channel`` and dynamic has one scale per token. Groups always run along the input features, whatever axis
    is named. ``group_size`` -1 means one group as wide as the row. What is left out is filled in: ``symmetric`` is True
    for signed formats, ``observer_cls`` is the min-max one of the scheme.
    """

    dtype: Dtype
    observer_cls: ObserverName | None = None
    is_dynamic: StrictBool | None = None
    qscheme: QSchemeType = QSchemeType.per_tensor
    ch_axis: StrictInt | None = None
    group_size: StrictInt | None = None
    symmetric: StrictBool | None = None
    round_method: RoundType = RoundType.half_even
    scale_type: ScaleType = ScaleType.float

    @property
    def format(self) -> Format:
        return FORMATS[self.dtype.value]

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Null means "the default", as in the JSON that other tools write."""
        if not isinstance(values, dict):
            return values
        filled = {name: value for name, value in values.items() if value is not None}
        dtype = getattr(filled.get("dtype"), "value", filled.get("dtype"))
        filled.setdefault("symmetric", dtype not in FORMATS or FORMATS[dtype].signed)
        filled.setdefault("is_dynamic", False)
        if "observer_cls" not in filled:
            scheme = filled.get("qscheme", QSchemeType.per_tensor)
            if scheme in [member.value for member in QSchemeType]:
                filled["observer_cls"] = MIN_MAX_OBSERVERS[QSchemeType(scheme)]
        return filled

    @model_validator(mode="after")
    def _make_sense(self) -> QuantizationSpec:
        if self.qscheme is QSchemeType.per_group:
            if self.group_size is None:
                raise ValueError("qscheme per_group needs group_size: a whole number above 0, or -1 for the whole row")
            if self.group_size == 0 or self.group_size < -1:
                raise ValueError(f"group_size is {self.group_size}; it must be above 0, or -1 for the whole row")
        elif self.group_size is not None:
            raise ValueError(f"group_size goes with qscheme per_group, not with {self.qscheme.value}; leave it out")
        if self.ch_axis is not None and self.ch_axis not in (-1, 0, 1):
            raise ValueError(f"ch_axis is {self.ch_axis}; a linear layer's tensors have axes 0 and 1 (or -1)")
        if not self.symmetric and self.dtype is Dtype.fp8_e4m3:
            raise ValueError("symmetric=false needs an integer dtype; a float format has no zero point")
        if self.symmetric and not self.format.signed:
            raise ValueError(
                f"{self.dtype.value} has no negative codes: set symmetric to false, or take a signed dtype"
            )
        return self


class QuantizationConfig(_Frozen):
    """What happens to one layer: its weight and, if wanted, its input. None keeps a tensor as it is."""

    input_tensors: QuantizationSpec | None = None
    output_tensors: None = Field(default=None, description="Quantized outputs are not available yet: leave it null.")
    weight: QuantizationSpec | None = None
    bias: None = Field(default=None, description="Quantized biases are not available yet: leave it null.")

    @model_validator(mode="after")
    def _make_sense(self) -> QuantizationConfig:
        weight, inputs = self.weight, self.input_tensors
        if weight is not None:
            if weight.is_dynamic:
                raise ValueError("a weight does not change: set is_dynamic to false in the weight's spec")
            if weight.qscheme is QSchemeType.per_channel and weight.ch_axis not in (None, 0):
                raise ValueError(f"a per_channel weight has its channels on ch_axis 0, not {weight.ch_axis}")
        if inputs is not None:
            if weight is None:
                raise ValueError("input_tensors without weight: quantize the weight as well, or neither")
            if inputs.qscheme is QSchemeType.per_group:
                raise ValueError(
                    "input_tensors can be per_tensor, or per_channel with is_dynamic=true (one scale a token)"
                )
            if inputs.qscheme is QSchemeType.per_channel and not inputs.is_dynamic:
                raise ValueError("per_channel input_tensors are one scale a token, which needs is_dynamic=true")
        return self

    @property
    def needs_calibration(self) -> bool:
        """True if the input's range must be learned from data."""
        return self.input_tensors is not None and not self.input_tensors.is_dynamic


class Config(_Frozen):
    """How a whole model is quantized.

    A layer's config is the first match of: ``exclude`` (kept as it is), ``layer_quant_config`` (patterns in order),
    ``global_quant_config``. Patterns are shell globs on the full module name (``*.down_proj``).
    """

    global_quant_config: QuantizationConfig
    layer_type_quant_config: dict[str, QuantizationConfig] = Field(default={}, max_length=0)
    layer_quant_config: dict[str, QuantizationConfig] = {}
    kv_cache_quant_config: dict[str, QuantizationConfig] = Field(default={}, max_length=0)
    exclude: tuple[str, ...] = ()
    algo_config: None = None
    quant_mode: Literal["eager_mode"] = "eager_mode"


class CalibrationConfig(_Frozen):
    """The text that shows the engine what activations look like: ``num_samples`` windows of ``seq_len`` tokens.

    ``source``: ``builtin`` (prose that comes with Python), a ``.txt``/``.md`` file, or a ``.jsonl`` file with a
    ``text`` field a line.
    """

    source: Annotated[str, Field(min_length=1, max_length=4096)] = "builtin"
    num_samples: Annotated[StrictInt, Field(ge=1, le=65536)] = 32
    seq_len: Annotated[StrictInt, Field(ge=8, le=131072)] = 512
    seed: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] = 0


def parse_config(data: object) -> Config:
    """JSON data -> Config. Raises ConfigError(code='invalid_config') that points at the first field at fault."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        pointer = "".join(f"/{part}" for part in first["loc"])
        raise ConfigError(
            f"The config is not valid at {pointer or '/'}: {first['msg']}.",
            code="invalid_config",
            hint=f"{error.error_count()} problem(s) in all; fields are named as in docs/config.md.",
            field=pointer,
        ) from error
