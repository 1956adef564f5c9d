"""The options of the algorithms as validated values, named as in AMD Quark; the algorithms' code is elsewhere.

``ALGORITHMS`` maps the name of each algorithm to the class of its options. An installed package adds its own through
the entry points ``bitfoundry.transforms`` and ``bitfoundry.solvers`` (docs/extending/algorithm.md).

The engine discovers and proves the edges between layers by itself; ``scaling_layers`` is accepted so that files written
for AMD Quark work unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from operator import not_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticKnownError, core_schema

from quantcore.config.quark_layers import ScalingLayer, StreamLayers
from quantcore.config.values import STRICT, Value, config_error
from quantcore.errors import ConfigError
from quantcore.registry import Registry


def _help_of_bases(schema: dict[str, Any], options: type) -> None:
    """Add the help texts of inherited fields to a class's JSON schema: pydantic reads those of its own fields only."""
    for base in options.__mro__[1:]:
        for name, field in getattr(base, "__pydantic_fields__", {}).items():
            if field.description:
                schema["properties"][name].setdefault("description", field.description)


OPTIONS = ConfigDict(**STRICT, use_attribute_docstrings=True, json_schema_extra=_help_of_bases)
"""The docstring below a field is the help text of the option, in the JSON schema and on the dashboard."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class TransformConfig(Value):
    """The options of a transform, which changes weights before they are rounded. A chain may have several.

    A class of an installed package also has a method ``create`` that makes the transform (see
    ``quantcore.engine.transforms``) from these options. It imports torch only when called, because the class itself
    must be importable without.

    ``num_grams``: the number of matrices [inputs, inputs] that it learns for each input. ``on_one_process``: ranks
    cannot share its work.
    """

    num_grams: ClassVar[int] = 0
    on_one_process: ClassVar[bool] = False
    scaling_layers: tuple[ScalingLayer, ...] = ()
    model_decoder_layers: str | None = None
    embedding_layers: tuple[str, ...] | None = None

    @property
    def needs_calibration(self) -> bool:
        """True if the algorithm uses calibration data."""
        return True


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class SolverConfig(Value):
    """The options of a solver, which rounds the weights. A chain has one at most, at its end.

    A class of an installed package also has a method ``create``, as transforms have (see ``quantcore.engine.solvers``).

    ``compares``: it uses the activations of the float model beside those of the quantized one. ``needs_backward``: it
    uses gradients of the float model's predictions. ``num_grams`` and ``on_one_process``: as for transforms.
    ``num_factors``: the number of further matrices of that size in memory while it solves the layers of one input.
    ``row_copies``: that of copies of the rows that it solves at a time, in float32; GPTQ holds targets, two pairs of
    values and errors, the better values, and work space. ``needs_whole_blocks``: it runs on no shards of blocks.
    """

    compares: ClassVar[bool] = False
    needs_backward: ClassVar[bool] = False
    num_grams: ClassVar[int] = 1
    num_factors: ClassVar[int] = 2
    row_copies: ClassVar[int] = 7
    on_one_process: ClassVar[bool] = False
    needs_whole_blocks: ClassVar[bool] = False
    inside_layer_modules: tuple[str, ...] = ()
    model_decoder_layers: str | None = None
    embedding_layers: tuple[str, ...] | None = None

    @property
    def needs_calibration(self) -> bool:
        """True if the algorithm uses calibration data."""
        return True


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class SmoothQuantConfig(TransformConfig):
    """SmoothQuant (Xiao et al. 2022): s = max|x|^alpha / max|w|^(1 - alpha) divides inputs and multiplies weights.

    AMD Quark's default of ``alpha`` is 1; 0.8 left less error with every scheme measured.
    """

    name: Literal["smooth", "smoothquant"] = "smooth"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.8
    """0 leaves outliers to the activations, 1 moves them all into the weights."""
    scale_clamp_min: Annotated[float, Field(gt=0)] = 1e-3
    """No scale is below this."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class AutoSmoothQuantConfig(TransformConfig):
    """SmoothQuant whose alpha is searched for every edge, in steps of 0.05, by the error of the consumers' outputs.

    The error is computed on a sample of the tokens, with weights and inputs quantized as planned.
    """

    name: Literal["autosmoothquant"] = "autosmoothquant"
    compute_scale_loss: Literal["MSE", "MAE", "RMSE"] = "MSE"
    """Measure of the error of the consumers' outputs."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class AWQConfig(TransformConfig):
    """AWQ, activation-aware weight quantization (Lin et al. 2023): weights that meet large inputs are scaled up.

    The scale of every edge is searched by the error that rounding the weights leaves; inputs are not quantized.
    """

    num_grams: ClassVar[int] = 1
    name: Literal["awq"] = "awq"


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RTNConfig(SolverConfig):
    """Rounding to the nearest code, with ranges searched so that the layer's output changes least."""

    num_factors: ClassVar[int] = 1
    row_copies: ClassVar[int] = 4
    name: Literal["rtn"] = "rtn"
    range_search: bool = True
    """Without it, and without any solver, the spec's observer finds the ranges in the weight alone."""
    imatrix: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(default=None, exclude_if=not_)
    """Path of an importance matrix (llama-imatrix), whose mean squares of the inputs take the place of calibration."""

    @property
    def needs_calibration(self) -> bool:
        return self.range_search and self.imatrix is None


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class GPTQConfig(SolverConfig):
    """GPTQ (Frantar et al. 2022): rounds column by column, and corrects the columns after it for each error.

    ``block_size`` has no effect, because blocks are halved recursively here; it is accepted for files written for other
    tools. AMD Quark's default of ``true_sequential`` is true; inputs of the float model gave no worse results in a
    third of the time, and GPTAQ does better with the quantized ones.
    """

    num_factors: ClassVar[int] = 3
    name: Literal["gptq"] = "gptq"
    block_size: Annotated[int, Field(ge=1)] = 128
    damp_percent: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the Hessian's mean diagonal that is added to it. By default the larger, the fewer tokens per input."""
    desc_act: bool = True
    """Rounds the inputs with the most power first. Writes no index of groups into the files."""
    static_groups: bool = False
    """Finds the ranges of all groups before rounding begins. Otherwise the range of each is found when it is reached,
    and ``desc_act`` orders whole groups."""
    true_sequential: bool = False
    """Takes a layer's inputs from the quantized layers before it, also within a block: several passes per block."""
    range_search: bool = True
    """Chooses ranges by the error of the layer's output, instead of the spec's observer."""
    hessian_dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the factorized matrix."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class GPTAQConfig(GPTQConfig):
    """GPTAQ (Li et al. 2025): GPTQ that also corrects the change of the input by the quantized layers before.

    Inputs come through whole quantized blocks, so ``true_sequential`` does not apply.
    """

    compares: ClassVar[bool] = True
    num_grams: ClassVar[int] = 2
    name: Literal["gptaq"] = "gptaq"  # type: ignore[assignment]
    true_sequential: Literal[False] = False
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the input's change that is corrected."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class YAQAConfig(GPTAQConfig):
    """YAQA (Tseng et al. 2025): rounds for the least divergence of the model's predictions.

    Needs one pass of the calibration text backward through the float model, whose gradients say which tokens and which
    outputs of a layer count.
    """

    needs_backward: ClassVar[bool] = True
    name: Literal["yaqa"] = "yaqa"  # type: ignore[assignment]
    output_damp_percent: Annotated[float, Field(gt=0)] = 1.0
    """Share of the mean diagonal that is added to the second moments of the gradients. Less overfits short texts."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class QronosConfig(GPTQConfig):
    """Qronos (Zhang et al. 2025): corrects past errors of weights and activations before it rounds each column."""

    compares: ClassVar[bool] = True
    num_grams: ClassVar[int] = 2
    name: Literal["qronos"] = "qronos"  # type: ignore[assignment]
    true_sequential: Literal[False] = False


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RotationConfig(TransformConfig):
    """Rotation (QuaRot, Ashkboos et al. 2024), which spreads the outliers of a channel over all channels.

    ``r1`` and ``r2`` are folded into weights and cost nothing at run time. ``r3`` and ``r4`` are applied while the
    model runs; only ``ModelQuantizer`` supports them, because no file can hold them. With ``r3`` the outputs of k_proj
    are quantized behind the rotation. The fields below ``seed`` are AMD Quark's: names of modules are not needed, and
    only fixed rotations are available.
    """

    name: Literal["rotation"] = "rotation"
    scaling_layers: StreamLayers | tuple[()] = ()  # type: ignore[assignment]
    r1: bool = True
    """Rotates the residual stream."""
    r2: bool = False
    """Rotates the values of each head."""
    r3: bool = False
    """Rotates each head of queries and keys, behind RoPE, while the model runs. No file can hold it."""
    r4: bool = False
    """Rotates the input of the last layer of an MLP while the model runs. No file can hold it."""
    rotation_size: Annotated[int, Field(ge=1)] | None = None
    """Number of channels of the blocks that are rotated. By default all."""
    random_r1: bool = True
    """Adds random signs to ``r1``; without them one channel gets the sum of all."""
    random_r2: bool = False
    """Adds random signs to ``r2``."""
    seed: int = 0
    """Decides the random signs."""
    backbone: str | None = None
    v_proj: str | None = None
    o_proj: str | None = None
    self_attn: str | None = None
    mlp: str | None = None
    online_r1_rotation: Literal[False] | None = None
    online_config: None = None
    trainable: Literal[False] = False
    train_smooth: Literal[False] | None = None
    smooth_positions: tuple[()] | None = None


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class AutoRoundConfig(SolverConfig):
    """AutoRound (Cheng et al. 2023): tunes rounding and scales of a block's weights together by signed gradients.

    It starts from the codes of YAQA, and keeps them in blocks where tuning gains nothing on windows that it did not
    see. Every step runs the block forward and backward: the slowest of the algorithms by far.
    """

    start: ClassVar[type[YAQAConfig]] = YAQAConfig
    compares: ClassVar[bool] = start.compares
    needs_backward: ClassVar[bool] = start.needs_backward
    num_grams: ClassVar[int] = start.num_grams
    num_factors: ClassVar[int] = start.num_factors
    needs_whole_blocks: ClassVar[bool] = True
    name: Literal["autoround"] = "autoround"
    iters: Annotated[int, Field(ge=1)] = 200
    """Number of steps."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Calibration windows of each step."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the rounding, which falls to 0. By default 1 / iters."""
    minmax_lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the ranges. By default a fifth of that of the rounding."""
    seed: int = 0
    """Decides which windows each step takes."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class CorrectionConfig(Value):
    """The options of a correction, which changes what rounding has left in high precision."""

    num_grams: ClassVar[int] = 0
    on_one_process: ClassVar[bool] = False

    @property
    def needs_calibration(self) -> bool:
        """True if the algorithm uses calibration data."""
        return True


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class BiasCorrectionConfig(CorrectionConfig):
    """Bias correction (Nagel et al. 2019): subtracts from a layer's bias the change of its mean output by rounding.

    Layers without a bias stay as they are, because the model's class has no parameter for one.
    """

    name: Literal["bias_correction"] = "bias_correction"


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class DistillConfig(CorrectionConfig):
    """Scale-only distillation (EfficientQAT, Chen et al. 2024): tunes the scales for the float model's predictions.

    The codes stay as they are. The tuned scales are kept only if they gain on windows that tuning did not see.
    """

    on_one_process: ClassVar[bool] = True
    name: Literal["distill"] = "distill"
    num_windows: Annotated[int, Field(ge=1)] = 64
    """Calibration windows that it learns from, beside those of the solver."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """How often each window is used."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Learning rate of the logarithms of the scales, which falls to 0."""
    seed: int = 0
    """Decides the order of the windows."""


BuiltIn = Annotated[
    SmoothQuantConfig
    | AutoSmoothQuantConfig
    | AWQConfig
    | RotationConfig
    | RTNConfig
    | GPTQConfig
    | GPTAQConfig
    | YAQAConfig
    | QronosConfig
    | AutoRoundConfig
    | BiasCorrectionConfig
    | DistillConfig,
    Field(discriminator="name"),
]
_NAMES_OF: dict[Any, tuple[str, ...]] = {
    options: get_args(options.__pydantic_fields__["name"].annotation) for options in get_args(get_args(BuiltIn)[0])
}
NAMES = tuple(names[-1] for names in _NAMES_OF.values())  # before it are other spellings
BUILT_IN_NAMES = frozenset(name for names in _NAMES_OF.values() for name in names)


def _check(name: str, entry: Any) -> None:
    """Raise ValueError unless ``entry`` is a usable class of options for the algorithm ``name``."""
    if not (isinstance(entry, type) and issubclass(entry, TransformConfig | SolverConfig) and is_dataclass(entry)):
        raise ValueError("it is not a dataclass derived from TransformConfig or SolverConfig")
    if not callable(getattr(entry, "create", None)):
        raise ValueError(f"{entry.__name__} has no method create")
    made = TypeAdapter(entry).validate_python({})
    if getattr(made, "name", None) != name:
        raise ValueError(f"{entry.__name__} has no field name: Literal['{name}'] = '{name}'")


ALGORITHMS: Registry[Any] = Registry("algorithm", None, "bitfoundry.transforms", "bitfoundry.solvers", check=_check)
for _options, _names in _NAMES_OF.items():
    for _name in _names:
        ALGORITHMS.add(_name)(_options)


def algorithm_names() -> tuple[str, ...]:
    """Return the names of all algorithms; those of installed packages and of this process come last."""
    return (*NAMES, *_added())


def creators(base: type) -> dict[str, Any]:
    """Return ``create``, by name, of the algorithms that are not built in and whose options derive from ``base``."""
    return {name: options.create for name, options in _added().items() if issubclass(options, base)}


def _added() -> dict[str, Any]:
    """Return the options of the algorithms that are not built in."""
    return {name: ALGORITHMS.get(name) for name in ALGORITHMS if name not in BUILT_IN_NAMES}


class _AddedAsWell:
    """Annotation with which pydantic validates and describes added algorithms beside the built-in ones."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(cls._validate, handler(source), serialization=as_it_is)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        choices = handler(schema)
        choices["oneOf"] += [handler(TypeAdapter(options).core_schema) for options in _added().values()]
        return choices

    @staticmethod
    def _validate(value: Any, built_in: Callable[[Any], Any]) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        if not isinstance(name, str):
            return built_in(value)  # which says that a name is needed
        options = ALGORITHMS.find(name)
        if options is not None:  # built in or added: the place of an error is that of the option
            return TypeAdapter(options).validate_python(value)
        tags = ", ".join(f"'{tag}'" for tag in ("smooth", *algorithm_names()))
        raise PydanticKnownError("union_tag_invalid", {"discriminator": "'name'", "tag": name, "expected_tags": tags})


AlgoConfig = Annotated[BuiltIn, _AddedAsWell]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(AlgoConfig)


def config_of(name: str) -> Any:
    """Return the config of the algorithm called ``name`` with its defaults."""
    return _ADAPTER.validate_python({"name": name})


def load_quant_algo_config_from_file(file_path: str | Path) -> Any:
    """Read an algorithm's config from a JSON file such as ``{"name": "autosmoothquant", "scaling_layers": [...]}``.

    Raises ConfigError that names the file and the field at fault.
    """
    hint = f"It is a JSON object with a `name`: {', '.join(algorithm_names())}."
    try:
        return _ADAPTER.validate_python(json.loads(Path(file_path).read_text("utf-8")))
    except ValidationError as error:
        what = f"The algorithm config {file_path}"
        raise config_error(error, what, code="invalid_algo_config", hint=hint, prefix="/algo_config") from error
    except (OSError, ValueError) as error:
        reason = f"{file_path} is not an algorithm config: {error}."
        raise ConfigError(reason, code="invalid_algo_config", hint=hint, field="/algo_config") from error
