"""The options of the algorithms as validated values, named as in AMD Quark; the algorithms' code is elsewhere.

``ALGORITHMS`` maps the name of each algorithm to the class of its options. An installed package adds its own through
the entry points ``bitfoundry.transforms`` and ``bitfoundry.solvers`` (docs/extending/algorithm.md).

The engine discovers and proves the edges between layers by itself; ``scaling_layers`` is accepted so that files written
for AMD Quark work unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticKnownError, core_schema

from quantcore.config.values import STRICT, Value, config_error
from quantcore.errors import ConfigError
from quantcore.registry import Registry


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScalingLayer(Value):
    """An edge as AMD Quark writes it: the scale of ``layers``' common input is folded into ``prev_op``.

    ``inp`` is the layer whose input is watched, ``module2inspect`` the module whose output error is measured.
    """

    prev_op: str
    layers: tuple[str, ...]
    inp: str
    module2inspect: str | None = None
    has_kwargs: bool = False
    condition: str | None = None
    help: str | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TransformConfig(Value):
    """The options of a transform, which changes weights before they are rounded. A chain may have several.

    A class of an installed package also has a method ``create`` that makes the transform (see ``quantcore.transforms``)
    from these options. It imports torch only when called, because the class itself must be importable without.

    ``num_grams``: the number of matrices [inputs, inputs] that it learns for each input. ``on_one_process``: ranks
    cannot share its work.
    """

    num_grams: ClassVar[int] = 0
    num_factors: ClassVar[int] = 2
    on_one_process: ClassVar[bool] = False
    scaling_layers: tuple[ScalingLayer, ...] = ()
    model_decoder_layers: str | None = None
    embedding_layers: tuple[str, ...] | None = None

    @property
    def needs_calibration(self) -> bool:
        """True if the algorithm uses calibration data."""
        return True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SolverConfig(Value):
    """The options of a solver, which rounds the weights. A chain has one at most, at its end.

    A class of an installed package also has a method ``create``, as transforms have (see ``quantcore.solvers``).

    ``compares``: it uses the activations of the float model beside those of the quantized one. ``goes_back``: it uses
    gradients of the float model's predictions. ``num_grams`` and
    ``on_one_process``: as for transforms. ``num_factors``: the number of further matrices of that size in memory while
    it solves the layers of one input.
    """

    compares: ClassVar[bool] = False
    goes_back: ClassVar[bool] = False
    num_grams: ClassVar[int] = 1
    num_factors: ClassVar[int] = 2
    on_one_process: ClassVar[bool] = False
    inside_layer_modules: tuple[str, ...] = ()
    model_decoder_layers: str | None = None
    embedding_layers: tuple[str, ...] | None = None

    @property
    def needs_calibration(self) -> bool:
        """True if the algorithm uses calibration data."""
        return True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SmoothQuantConfig(TransformConfig):
    """SmoothQuant (Xiao et al. 2022): s = max|x|^alpha / max|w|^(1 - alpha) divides inputs and multiplies weights.

    ``alpha`` 0 leaves outliers to the activations, 1 moves them all into the weights. AMD Quark's default is 1; 0.8
    left less error with every scheme measured. No scale is below ``scale_clamp_min``.
    """

    name: Literal["smooth", "smoothquant"] = "smooth"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.8
    scale_clamp_min: Annotated[float, Field(gt=0)] = 1e-3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AutoSmoothQuantConfig(TransformConfig):
    """SmoothQuant whose alpha is searched for every edge, in steps of 0.05, by the error of the consumers' outputs.

    ``compute_scale_loss`` is the measure of that error. It is computed on a sample of the tokens, with weights and
    inputs quantized as planned.
    """

    name: Literal["autosmoothquant"] = "autosmoothquant"
    compute_scale_loss: Literal["MSE", "MAE", "RMSE"] = "MSE"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AWQConfig(TransformConfig):
    """AWQ, activation-aware weight quantization (Lin et al. 2023): weights that meet large inputs are scaled up.

    The scale of every edge is searched by the error that rounding the weights leaves; inputs are not quantized.
    """

    num_grams: ClassVar[int] = 1
    name: Literal["awq"] = "awq"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RTNConfig(SolverConfig):
    """Rounding to the nearest code, with ranges searched so that the layer's output changes least (``range_search``).

    Without it, and without any solver, the spec's observer finds the ranges in the weight alone.
    """

    name: Literal["rtn"] = "rtn"
    range_search: bool = True

    @property
    def needs_calibration(self) -> bool:
        return self.range_search


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GPTQConfig(SolverConfig):
    """GPTQ (Frantar et al. 2022). ``damp_percent``: share of the Hessian's mean diagonal that is added to it.

    None chooses it by the number of tokens: the fewer tokens per input, the larger. ``desc_act`` rounds the inputs with
    the most power first. ``static_groups`` fixes every group's range beforehand; without it ranges are found when a
    group is reached, and ``desc_act`` orders whole groups. Neither writes an index of groups into the files.
    ``range_search`` chooses ranges by the error of the layer's output, instead of the spec's observer.
    ``true_sequential`` takes the inputs of each layer from the quantized layers before it, also within a block:
    several passes over the calibration text per block instead of one. AMD Quark's default is true; inputs of the float
    model gave no worse results in a third of the time, and GPTAQ does better with the quantized ones.
    ``hessian_dtype`` is the dtype of the factorized matrix. ``block_size`` has no effect, because blocks are halved
    recursively here; it is accepted for files written for other tools.
    """

    num_factors: ClassVar[int] = 3
    name: Literal["gptq"] = "gptq"
    block_size: Annotated[int, Field(ge=1)] = 128
    damp_percent: Annotated[float, Field(gt=0, lt=1)] | None = None
    desc_act: bool = True
    static_groups: bool = False
    true_sequential: bool = False
    range_search: bool = True
    hessian_dtype: Literal["float32", "float64"] = "float32"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GPTAQConfig(GPTQConfig):
    """GPTAQ (Li et al. 2025): GPTQ that also corrects the change of the input by the quantized layers before.

    ``alpha`` is the share of that correction. Inputs come through whole quantized blocks, so ``true_sequential`` does
    not apply.
    """

    compares: ClassVar[bool] = True
    num_grams: ClassVar[int] = 2
    name: Literal["gptaq"] = "gptaq"  # type: ignore[assignment]
    true_sequential: Literal[False] = False
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.25


@dataclass(frozen=True, kw_only=True, config=STRICT)
class YAQAConfig(GPTAQConfig):
    """YAQA (Tseng et al. 2025): rounds for the least divergence of the model's predictions.

    Needs one pass of the calibration text backward through the float model, whose gradients say which tokens and which
    outputs of a layer count. ``output_damp_percent``: share of the mean diagonal that is added to the second moments of
    the gradients. With less, the few tokens of a calibration text are taken too literally.
    """

    goes_back: ClassVar[bool] = True
    name: Literal["yaqa"] = "yaqa"  # type: ignore[assignment]
    output_damp_percent: Annotated[float, Field(gt=0)] = 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QronosConfig(GPTQConfig):
    """Qronos (Zhang et al. 2025): corrects past errors of weights and activations before it rounds each column."""

    compares: ClassVar[bool] = True
    num_grams: ClassVar[int] = 2
    name: Literal["qronos"] = "qronos"  # type: ignore[assignment]
    true_sequential: Literal[False] = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RotatedLayers(Value):
    """A passage of the residual stream as AMD Quark lists it: ``prev_modules``, then a norm, then ``next_modules``."""

    prev_modules: tuple[str, ...] = ()
    norm_module: str | None = None
    next_modules: tuple[str, ...] = ()
    target_modules: tuple[str, ...] = ()


_StreamLayers = dict[Literal["first_layer", "middle_layers", "last_layer"], tuple[RotatedLayers, ...]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RotationConfig(TransformConfig):
    """Rotation (QuaRot, Ashkboos et al. 2024), which spreads the outliers of a channel over all channels.

    ``r1`` rotates the residual stream, ``r2`` the values of each head: both are folded into weights and cost nothing at
    run time. ``r3`` (each head of queries and keys, behind RoPE) and ``r4`` (the input of the last layer of an MLP) are
    applied while the model runs; only ``ModelQuantizer`` supports them, because no file can hold them. With ``r3``
    the outputs of k_proj are quantized behind the rotation.
    ``random_r1`` and ``random_r2`` add random signs by ``seed``; without them one channel gets the sum of all.
    ``rotation_size`` is the number of channels of the blocks that are rotated. The other fields are AMD Quark's: names
    of modules are not needed, and only fixed rotations are available.
    """

    name: Literal["rotation"] = "rotation"
    scaling_layers: _StreamLayers | tuple[()] = ()  # type: ignore[assignment]
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: Annotated[int, Field(ge=1)] | None = None
    random_r1: bool = True
    random_r2: bool = False
    seed: int = 0
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AutoRoundConfig(SolverConfig):
    """AutoRound (Cheng et al. 2023): tunes rounding and scales of a block's weights together by signed gradients.

    ``iters`` steps, each on ``batch_size`` calibration windows; ``lr`` (1 / iters if None) falls to 0. Every step runs
    the block forward and backward: the slowest of the algorithms by far, and the best below 4 bits.
    """

    compares: ClassVar[bool] = True
    on_one_process: ClassVar[bool] = True
    name: Literal["autoround"] = "autoround"
    iters: Annotated[int, Field(ge=1)] = 200
    batch_size: Annotated[int, Field(ge=1)] = 8
    lr: Annotated[float, Field(gt=0)] | None = None
    minmax_lr: Annotated[float, Field(gt=0)] | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CorrectionConfig(Value):
    """The options of a correction, which changes what rounding has left in high precision."""

    num_grams: ClassVar[int] = 0
    num_factors: ClassVar[int] = 0
    on_one_process: ClassVar[bool] = False

    @property
    def needs_calibration(self) -> bool:
        """True if the algorithm uses calibration data."""
        return True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BiasCorrectionConfig(CorrectionConfig):
    """Bias correction (Nagel et al. 2019): subtracts from a layer's bias the change of its mean output by rounding.

    Layers without a bias stay as they are, because the model's class has no parameter for one.
    """

    name: Literal["bias_correction"] = "bias_correction"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DistillConfig(CorrectionConfig):
    """Scale-only distillation (EfficientQAT, Chen et al. 2024): tunes the scales for the float model's predictions.

    It learns from ``num_windows`` more windows of the calibration text, ``epochs`` times; ``lr`` falls to 0.
    """

    on_one_process: ClassVar[bool] = True
    name: Literal["distill"] = "distill"
    num_windows: Annotated[int, Field(ge=1)] = 64
    epochs: Annotated[int, Field(ge=1)] = 1
    lr: Annotated[float, Field(gt=0)] = 4e-3
    seed: int = 0


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
NAMES = (
    "smoothquant", "autosmoothquant", "awq", "rotation", "rtn", "gptq", "gptaq", "yaqa", "qronos", "autoround",
    "bias_correction", "distill",
)  # fmt: skip
BUILT_IN_NAMES = frozenset((*NAMES, "smooth"))


def _check(name: str, entry: Any) -> None:
    """Raise ValueError unless ``entry`` is a usable class of options for the algorithm ``name``."""
    if not (isinstance(entry, type) and issubclass(entry, TransformConfig | SolverConfig) and is_dataclass(entry)):
        raise ValueError("it is no dataclass derived from TransformConfig or SolverConfig")
    if not callable(getattr(entry, "create", None)):
        raise ValueError(f"{entry.__name__} has no method create")
    made = TypeAdapter(entry).validate_python({})
    if getattr(made, "name", None) != name:
        raise ValueError(f"{entry.__name__} has no field name: Literal['{name}'] = '{name}'")


ALGORITHMS: Registry[Any] = Registry("algorithm", None, "bitfoundry.transforms", "bitfoundry.solvers", check=_check)
for _options in get_args(get_args(BuiltIn)[0]):
    for _name in get_args(_options.__pydantic_fields__["name"].annotation):
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
        if not isinstance(name, str) or name in BUILT_IN_NAMES:
            return built_in(value)
        options = ALGORITHMS.find(name)
        if options is not None:
            return TypeAdapter(options).validate_python(value)
        tags = ", ".join(f"'{tag}'" for tag in ("smooth", *algorithm_names()))
        raise PydanticKnownError("union_tag_invalid", {"discriminator": "'name'", "tag": name, "expected_tags": tags})


AlgoConfig = Annotated[BuiltIn, _AddedAsWell]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(AlgoConfig)


def config_of(name: str) -> Any:
    """Return the config of the algorithm called ``name`` with its defaults."""
    return _ADAPTER.validate_python({"name": name})


def check_chain(algo_config: Sequence[Any]) -> None:
    """Raise ValueError unless ``algo_config`` is transforms, at most one solver, corrections: each kind once."""
    solvers: list[Any] = [algorithm for algorithm in algo_config if isinstance(algorithm, SolverConfig)]
    if len(solvers) > 1:
        names = " and ".join(solver.name for solver in solvers)
        raise ValueError(f"{names} both round the weights: one chain has one of them")
    in_order = sorted(algo_config, key=_place)
    if in_order != list(algo_config):
        late = next(after for after, before in zip(algo_config, in_order, strict=True) if after is not before)
        what = "rounds the weights" if late in solvers else "corrects what rounding did"
        raise ValueError(f"{late.name} {what}, so it comes last: {', '.join(algorithm.name for algorithm in in_order)}")
    kinds = [type(algorithm) for algorithm in algo_config]
    twice = next((algorithm for algorithm in algo_config if kinds.count(type(algorithm)) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice.name} is named twice")


def _place(algorithm: Any) -> int:
    return 2 if isinstance(algorithm, CorrectionConfig) else int(isinstance(algorithm, SolverConfig))


def load_quant_algo_config_from_file(file_path: str | Path) -> Any:
    """Read an algorithm's config from a JSON file such as ``{"name": "autosmoothquant", "scaling_layers": [...]}``.

    Raises ConfigError that names the file and the field at fault.
    """
    hint = f"It is one JSON object with a `name`: {', '.join(algorithm_names())}."
    try:
        return _ADAPTER.validate_python(json.loads(Path(file_path).read_text("utf-8")))
    except ValidationError as error:
        what = f"The algorithm config {file_path}"
        raise config_error(error, what, code="invalid_algo_config", hint=hint, prefix="/algo_config") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file_path} is not an algorithm config: {error}.",
            code="invalid_algo_config",
            hint=hint,
            field="/algo_config",
        ) from error
