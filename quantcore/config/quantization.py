"""The configs that users write: the spec of a tensor, the config of a layer, the config of a model.

All are frozen dataclasses that validate themselves and refuse unknown fields, so ``dataclasses.replace`` works and
validates again. ``to_dict`` and ``parse_config`` are inverses of each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from operator import not_
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, StrictBool, TypeAdapter, ValidationError, field_validator
from pydantic import model_validator as validator
from pydantic.dataclasses import dataclass

from quantcore.config.algorithm_chain import check_chain
from quantcore.config.algorithms import AlgoConfig, AutoRoundConfig, DistillConfig, RotationConfig, RTNConfig
from quantcore.config.gguf_types import GgufTypes
from quantcore.config.spec import (
    Dtype,
    QSchemeType,
    QuantizationSpec,
    RoundType,
    ScaleMode,
    ScaleType,
    ZeroPointType,
    one_of,
)
from quantcore.config.texts import BUILTIN, DATASET_ID, CalibrationConfig, TextSource, is_dataset_id
from quantcore.config.values import STRICT, Value, config_error, given_fields
from quantcore.errors import ConfigError

__all__ = [
    "BUILTIN",
    "DATASET_ID",
    "CalibrationConfig",
    "Config",
    "Dtype",
    "QSchemeType",
    "QuantizationConfig",
    "QuantizationMode",
    "QuantizationSpec",
    "RoundType",
    "ScaleMode",
    "ScaleType",
    "TextSource",
    "ZeroPointType",
    "is_dataset_id",
    "json_schema",
    "learns_from_data",
    "parse_config",
    "parse_size",
]

LAYER_TYPES = ("Linear", "Conv1d", "Conv2d", "ConvTranspose2d", "Conv1D", "Embedding", "EmbeddingBag")
"""Classes whose weight can be quantized. ``Conv1D`` is Transformers' transposed linear layer (GPT-2)."""

SIZE_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
DEFAULT_SHARD_SIZE = "5GB"

ONLY_WHEN_ASKED = ("Embedding", "EmbeddingBag")
CACHED_LAYERS = ("k_proj", "v_proj")
"""Usual names of the layers whose outputs are keys and values, in models with separate layers for these."""

Options = TypeVar("Options")


def is_cached(name: str) -> bool:
    """Return whether layer ``name`` has a common name of a key or value layer (see ``quantcore.config.kv_cache``)."""
    return name.rpartition(".")[2] in CACHED_LAYERS


def _as_glob(expression: str) -> str:
    """Return the glob for a regular expression ``re:...`` of the usual kind; an example for any other."""
    text = re.sub(r"\\[.]", ".", expression.removeprefix("re:").removeprefix("^").removesuffix("$"))
    glob = text.replace(".*", "*")
    return glob if glob and not _is_regular(glob) else "*.o_proj"


def _is_regular(pattern: str) -> bool:
    """Return True for signs that a regular expression has and no glob of layers needs."""
    return pattern.startswith(".*") or re.search(r"[\\^$()|+]", pattern) is not None


LayerType = Annotated[str, one_of("layer type", lambda: LAYER_TYPES)]


class QuantizationMode(StrEnum):
    """The way to quantize: ``eager_mode`` replaces modules, ``fx_graph_mode`` first traces with torch.export."""

    eager_mode = "eager_mode"
    fx_graph_mode = "fx_graph_mode"


@dataclass(frozen=True, config=STRICT)
class QuantizationConfig(Value):
    """The specs of one layer's tensors. None keeps a tensor as it is. The order of the fields is AMD Quark's.

    A weight or a bias is constant, so ``is_dynamic`` of its spec makes no difference and becomes False.
    """

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None

    @validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        return given_fields(values)

    @validator(mode="after")
    def _make_sense(self) -> Self:
        for name, fixed in (("weight", self.weight), ("bias", self.bias)):
            if fixed is not None and fixed.is_dynamic:  # it does not change: scales found anew would be the same ones
                object.__setattr__(self, name, replace(fixed, is_dynamic=False))
        if self.bias is not None and self.bias.qscheme not in (QSchemeType.per_tensor, QSchemeType.per_channel):
            raise ValueError(f"a bias has one axis: its qscheme is per_tensor or per_channel, not {self.bias.qscheme}")
        if self.input_tensors is not None and self.weight is None:
            raise ValueError("input_tensors need weight: quantize both or neither")
        for name, spec in (("input_tensors", self.input_tensors), ("output_tensors", self.output_tensors)):
            if spec is not None:
                _check_activation(name, spec)
        return self

    @property
    def needs_calibration(self) -> bool:
        """True if the range of the input or of the output must be learned from data."""
        return any(spec is not None and learns_from_data(spec) for spec in (self.input_tensors, self.output_tensors))


def learns_from_data(spec: QuantizationSpec) -> bool:
    """Return whether an activation's spec needs calibration: static scales, or NVFP4's static global scale."""
    return spec.is_static or spec.scale_type is ScaleType.e4m3


def _check_activation(name: str, spec: QuantizationSpec) -> None:
    if spec.qscheme is QSchemeType.per_block or spec.over is not None:
        raise ValueError(
            f"{name} can be per_tensor, per_channel or per_group; per_block and two stages are only for weights"
        )
    per_channel = spec.qscheme is QSchemeType.per_channel
    if per_channel and not spec.is_dynamic and spec.ch_axis not in (-1, 2):
        raise ValueError(
            f"per_channel {name} have one scale per token, which needs is_dynamic=true, or one per feature: static "
            "with ch_axis -1"
        )
    if per_channel and spec.is_dynamic and spec.ch_axis not in (None, 1, -2):
        raise ValueError(f"dynamic per_channel {name} have one scale per token: remove ch_axis (or set 1)")
    if spec.qscheme is QSchemeType.per_group and not spec.is_dynamic:
        raise ValueError(f"groups of {name} get their scales at run time: set is_dynamic to true")
    if spec.qscheme is QSchemeType.per_group and spec.ch_axis not in (None, -1, 1, 2):
        raise ValueError(f"groups of {name} run along the features: remove ch_axis (or set -1)")


@dataclass(frozen=True, config=STRICT)
class Config(Value):
    """The config of a whole model. The first four fields can be given by position, as in AMD Quark's class.

    A layer's config is the first match of: ``exclude`` (kept as it is), ``layer_quant_config`` (patterns in order),
    ``layer_type_quant_config``, ``global_quant_config``. Patterns are shell globs on the full module name
    (``*.down_proj``). Embeddings are quantized only if a name or a type matches them. ``kv_cache_quant_config`` adds
    ``output_tensors`` to the layers that compute keys and values, whatever else its patterns match; they apply where
    these enter the cache. If it also has weights or inputs, these apply to layers that ``layer_quant_config`` does not
    name. ``softmax_quant_spec`` is for the attention probabilities (fp8 attention). ``include`` has patterns of layers
    to quantize although they are kept by default for their role, such as routers and gates of recurrences.
    ``tower_quant_config`` is for the layers in the blocks of towers (encoders of images or sound) and
    ``draft_quant_config`` for those of draft heads (multi-token prediction); without it they are kept. ``gguf`` names
    types of a GGUF file's tensors by their role in the model. ``strict``: a pattern or class that fits no layer, and
    different schemes in a fused layer of vLLM, are errors, not warnings.
    """

    global_quant_config: QuantizationConfig
    layer_type_quant_config: dict[LayerType, QuantizationConfig] = Field(default_factory=dict)
    layer_quant_config: dict[str, QuantizationConfig] = Field(default_factory=dict)
    kv_cache_quant_config: dict[str, QuantizationConfig] = Field(default_factory=dict)
    _: KW_ONLY
    softmax_quant_spec: QuantizationSpec | None = None
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = Field(default=(), exclude_if=not_)  # an empty one changes no digest of a config
    tower_quant_config: QuantizationConfig | None = Field(default=None, exclude_if=not_)
    draft_quant_config: QuantizationConfig | None = Field(default=None, exclude_if=not_)
    gguf: GgufTypes | None = Field(default=None, exclude_if=not_)
    algo_config: tuple[AlgoConfig, ...] = ()
    quant_mode: QuantizationMode = QuantizationMode.eager_mode
    strict: StrictBool = False

    @property
    def needs_calibration(self) -> bool:
        """True if some layer's config or an algorithm needs calibration data."""
        if any(algorithm.needs_calibration for algorithm in self.algo_config):
            return True
        named = (self.kv_cache_quant_config, self.layer_quant_config, self.layer_type_quant_config)
        layers = (self.global_quant_config, *(layer for table in named for layer in table.values()))
        return any(layer.needs_calibration for layer in layers)

    @property
    def imatrix(self) -> str | None:
        """The path of the importance matrix that takes the place of calibration, if there is one."""
        return next((entry.imatrix for entry in self.algo_config if isinstance(entry, RTNConfig)), None)

    def with_imatrix(self, path: str) -> Config:
        """Return this config with another path of its importance matrix."""
        chain = (replace(entry, imatrix=path) if isinstance(entry, RTNConfig) else entry for entry in self.algo_config)
        return replace(self, algo_config=tuple(chain))

    @property
    def runs_alone(self) -> str | None:
        """The name of an algorithm that no ranks can share, if there is one."""
        return next((algorithm.name for algorithm in self.algo_config if algorithm.on_one_process), None)

    @property
    def needs_whole_blocks(self) -> str | None:
        """The name of an algorithm that cannot work on shards of blocks, if there is one."""
        whole = (entry.name for entry in self.algo_config if getattr(entry, "needs_whole_blocks", False))
        return self.runs_alone or next(whole, None)

    @property
    def needs_backward(self) -> bool:
        """True if an algorithm uses gradients of the float model's predictions."""
        return any(getattr(algorithm, "needs_backward", False) for algorithm in self.algo_config)

    @property
    def distills(self) -> DistillConfig | None:
        """The options of scale-only distillation, if it is in the chain."""
        return self._algorithm(DistillConfig)

    @property
    def autorounds(self) -> AutoRoundConfig | None:
        """The options of AutoRound, if it is in the chain."""
        return self._algorithm(AutoRoundConfig)

    @property
    def rotates_stream(self) -> bool:
        """True if a rotation changes the hidden states between blocks, and with them the embedding and the head."""
        return any(isinstance(step, RotationConfig) and step.r1 for step in self.algo_config)

    def _algorithm(self, options: type[Options]) -> Options | None:
        return next((algorithm for algorithm in self.algo_config if isinstance(algorithm, options)), None)

    @property
    def compares(self) -> bool:
        """True if an algorithm compares the quantized model with the float one: two streams instead of one."""
        return any(getattr(algorithm, "compares", False) for algorithm in self.algo_config)

    def choose(self, name: str, layer_type: str, *, in_cache: bool = True) -> tuple[QuantizationConfig | None, str]:
        """Return the config of layer ``name`` of class ``layer_type`` (None: kept as it is), and what decided it.

        ``in_cache`` False: its outputs are no keys or values, whatever its name is.
        """
        for pattern in self.exclude:
            if fnmatchcase(name, pattern):
                return None, f"excluded by '{pattern}'"
        chosen, why = self._choose_but_for_cache(name, layer_type)
        cache = self.cache_config(name) if in_cache else None
        if cache is None:
            return chosen, why
        pattern, layer = cache
        is_named = why.startswith("layer_quant_config")
        if is_named or layer == QuantizationConfig(output_tensors=layer.output_tensors):
            layer = replace(chosen or layer, output_tensors=layer.output_tensors)
        return layer, f"kv_cache_quant_config '{pattern}'" + (f" with {why}" if is_named else "")

    def names(self, name: str) -> bool:
        """Return True if ``include`` or ``layer_quant_config`` names the layer, so that its role does not keep it."""
        return name in self.layer_quant_config or any(fnmatchcase(name, pattern) for pattern in self.include)

    def cache_config(self, name: str) -> tuple[str, QuantizationConfig] | None:
        """Return the ``kv_cache_quant_config`` pattern that layer ``name`` fits, and its config; None if none fits."""
        fitting = (entry for entry in self.kv_cache_quant_config.items() if fnmatchcase(name, entry[0]))
        return next(fitting, None) if is_cached(name) else None

    def _choose_but_for_cache(self, name: str, layer_type: str) -> tuple[QuantizationConfig | None, str]:
        for pattern, chosen in self.layer_quant_config.items():
            if fnmatchcase(name, pattern):
                return chosen, f"layer_quant_config '{pattern}'"
        if layer_type in self.layer_type_quant_config:
            return self.layer_type_quant_config[layer_type], f"layer_type_quant_config '{layer_type}'"
        if layer_type in ONLY_WHEN_ASKED:
            return None, f"{layer_type} is quantized only if a name or type selects it"
        return self.global_quant_config, "global_quant_config"

    def warn_of_unmatched(self, layers: Mapping[str, str]) -> tuple[str, ...]:
        """Return warnings of the patterns and classes that fit none of ``layers`` (name -> class).

        Raises ConfigError ``unmatched_names`` instead if ``strict``.
        """
        warnings = [
            f"The pattern '{pattern}' matches no layer."
            + " Patterns are shell globs: '*o_proj'." * _is_regular(pattern)
            for pattern in self.unmatched_patterns(layers)
        ]
        types = [kind for kind in self.layer_type_quant_config if kind not in layers.values()]
        warnings += [f"The class '{kind}' of layer_type_quant_config matches no layer." for kind in types]
        if warnings and self.strict:
            raise ConfigError(
                " ".join(warnings),
                code="unmatched_names",
                hint="Correct or remove them. Without `strict`, they are only warnings.",
                field="/strict",
            )
        return tuple(warnings)

    def refuse_regular_expressions(self) -> None:
        """Raise ConfigError for patterns of other programs, ``re:...``: as globs they would match nothing."""
        tables = {
            "exclude": self.exclude,
            "include": self.include,
            "layer_quant_config": self.layer_quant_config,
            "kv_cache_quant_config": self.kv_cache_quant_config,
        }
        for field, patterns in tables.items():
            for pattern in patterns:
                if pattern.startswith("re:"):
                    raise ConfigError(
                        f"'{pattern}' is a regular expression, but layer patterns are shell globs.",
                        code="invalid_config",
                        hint=f"Write '{_as_glob(pattern)}': * stands for any text.",
                        field=f"/{field}",
                    )

    def unmatched_patterns(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that fit none of ``names``, without duplicates."""
        names = list(names)
        keys_and_values = [name for name in names if is_cached(name)]
        among = [*((pattern, names) for pattern in (*self.exclude, *self.include, *self.layer_quant_config))]
        among += [(pattern, keys_and_values) for pattern in self.kv_cache_quant_config]
        return list(dict.fromkeys(glob for glob, some in among if not any(fnmatchcase(name, glob) for name in some)))

    @validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        values = given_fields(values)
        if isinstance(values, dict) and not isinstance(values.get("algo_config", ()), list | tuple):
            values["algo_config"] = (values["algo_config"],)
        return values

    @field_validator("kv_cache_quant_config")
    @classmethod
    def _say_outputs(cls, table: dict[str, QuantizationConfig]) -> dict[str, QuantizationConfig]:
        empty = [pattern for pattern, layer in table.items() if layer.output_tensors is None]
        if empty:
            raise ValueError(f"'{empty[0]}' has no output_tensors, which are what a KV cache stores")
        return table

    @field_validator("tower_quant_config", "draft_quant_config")
    @classmethod
    def _need_no_data(cls, beside: QuantizationConfig | None) -> QuantizationConfig | None:
        if beside is not None and (beside.weight is None or beside.needs_calibration or beside.output_tensors):
            raise ValueError(
                "calibration does not run towers and draft heads: use only weights, or weights and dynamic inputs"
            )
        return beside

    @field_validator("algo_config")
    @classmethod
    def _one_chain(cls, chain: tuple[Any, ...]) -> tuple[Any, ...]:
        check_chain(chain)
        given = next((entry for entry in chain if isinstance(entry, RTNConfig) and entry.imatrix is not None), None)
        if given is not None and (len(chain) > 1 or not given.range_search):
            other = next((entry.name for entry in chain if entry is not given), "rtn without range_search")
            raise ValueError(
                f"an importance matrix holds mean squares of the inputs, with which rtn searches ranges; {other} cannot"
                " use it: leave one of them out"
            )
        return chain


_ADAPTER = TypeAdapter(Config)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a Config."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_ADAPTER.json_schema()}


def parse_size(text: str, what: str = "max_shard_size") -> int:
    """Return the bytes of a size written as for Transformers' ``save_pretrained``: "5GB", "500MB", in decimal units.

    Raises ConfigError ``invalid_<what>`` for anything else, and for less than a byte.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([TGMK]B)", text.upper())
    num_bytes = int(float(match[1]) * SIZE_UNITS[match[2]]) if match else 0
    if num_bytes < 1:
        raise ConfigError(
            f"'{text[:40]}' is not a file size.",
            code=f"invalid_{what}",
            hint=f"Use a number and a unit, such as 5GB or 500MB; units are {', '.join(SIZE_UNITS)} (powers of 1000).",
            field=f"/{what}",
        )
    return num_bytes


def parse_config(data: object) -> Config:
    """Return the Config of JSON data. Raises ConfigError ``invalid_config`` that points at the first field at fault."""
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise config_error(error, "The config", hint="See docs/reference/config.md for the names of fields.") from error
