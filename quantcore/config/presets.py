"""Table of the named schemes. A new scheme is one row; users can add rows of their own from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import starmap
from pathlib import Path
from typing import Any

from pydantic import Field, StrictInt

from quantcore.config.gguf_types import GGUF_TYPES, MIXES, GgufTypes
from quantcore.config.quantization import (
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
    parse_config,
)
from quantcore.config.values import Settings
from quantcore.errors import ConfigError, unknown_value

PER_TENSOR, PER_CHANNEL, PER_GROUP = QSchemeType.per_tensor, QSchemeType.per_channel, QSchemeType.per_group


def _spec(dtype: str, qscheme: QSchemeType = PER_TENSOR, *, dynamic: bool = False, symmetric: bool | None = None,
          group_size: int | None = None, scale_type: ScaleType = ScaleType.float,
          over: QuantizationSpec | None = None) -> QuantizationSpec:  # fmt: skip
    return QuantizationSpec(
        dtype=Dtype(dtype), qscheme=qscheme, is_dynamic=dynamic, symmetric=symmetric, group_size=group_size,
        scale_type=scale_type, over=over,
    )  # fmt: skip


def _groups(dtype: str, size: int) -> QuantizationSpec:
    return _spec(dtype, PER_GROUP, group_size=size)


def _mx(element: str, *, dynamic: bool = False) -> QuantizationSpec:
    return _spec(element, PER_GROUP, group_size=32, scale_type=ScaleType.e8m0, dynamic=dynamic)


def _nvfp4(*, dynamic: bool = False) -> QuantizationSpec:
    return _spec("fp4", PER_GROUP, group_size=16, scale_type=ScaleType.e4m3, dynamic=dynamic)


INT8, INT8_CHANNEL = _spec("int8"), _spec("int8", PER_CHANNEL)
INT8_OUTLIERS = QuantizationSpec(
    dtype=Dtype.int8, qscheme=PER_CHANNEL, is_dynamic=True, symmetric=True, outlier_threshold=6.0
)
INT8_TOKEN = _spec("int8", PER_CHANNEL, dynamic=True, symmetric=False)
FP8, FP8_DYNAMIC = _spec("fp8_e4m3"), _spec("fp8_e4m3", dynamic=True)
FP8_CHANNEL, FP8_TOKEN = _spec("fp8_e4m3", PER_CHANNEL), _spec("fp8_e4m3", PER_CHANNEL, dynamic=True)
FP8_BLOCK = QuantizationSpec(dtype=Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=(128, 128))
FP8_GROUP_128 = _spec("fp8_e4m3", PER_GROUP, group_size=128, dynamic=True)


@dataclass(frozen=True)
class Preset:
    """A config with a name. ``aliases`` are the names that the quantization script of AMD Quark gives it."""

    name: str
    title: str
    config: Config
    aliases: tuple[str, ...] = ()

    @property
    def layer_config(self) -> QuantizationConfig:
        return self.config.global_quant_config

    @property
    def needs_calibration(self) -> bool:
        return self.config.needs_calibration


def _row(name: str, title: str, weight: QuantizationSpec, inputs: QuantizationSpec | None = None,
         aliases: str = "", exclude: tuple[str, ...] = ("lm_head",)) -> Preset:  # fmt: skip
    layer = QuantizationConfig(weight=weight, input_tensors=inputs)
    return Preset(name, title, Config(global_quant_config=layer, exclude=exclude), tuple(aliases.split()))


ON_SMALL = ": experimental for small models (SmolLM2-135M: degraded)"
"""The end of a title whose default result was *degraded* on SmolLM2-135M (docs/benchmarks.md, "Presets by effort")."""
UNTRIED = ": try it before you rely on it"

_TABLE = (
    _row("int8_dynamic", "int8 weights per channel, asymmetric int8 activations with one scale a token, found at run "
         "time", INT8_CHANNEL, INT8_TOKEN),
    _row("int8_static", "int8 weights per channel, int8 activations with one calibrated scale a tensor",
         INT8_CHANNEL, INT8, "w_int8_per_channel_a_int8_per_tensor_sym"),
    _row("int8", "int8 weights and activations, one calibrated scale a tensor", INT8, INT8,
         "w_int8_a_int8_per_tensor_sym"),
    _row("int8_weight_only", "int8 weights per channel, activations untouched", INT8_CHANNEL,
         aliases="w_int8_per_channel_sym"),
    _row("int8_weight_only_per_tensor", "int8 weights with one scale a tensor, activations untouched", INT8,
         aliases="w_int8_per_tensor_sym"),
    _row("fp8", "fp8 (e4m3) weights and activations, one calibrated scale a tensor", FP8, FP8, "w_fp8_a_fp8"),
    _row("fp8_dynamic", "fp8 (e4m3) weights per channel, activations per token, found at run time",
         FP8_CHANNEL, FP8_TOKEN, "ptpc_fp8"),
    _row("fp8_block", "fp8 (e4m3) weights in blocks of 128x128, activations in groups of 128, found at run time",
         FP8_BLOCK, FP8_GROUP_128),
    _row("w4a16", "uint4 weights in asymmetric groups of 64, activations untouched" + ON_SMALL, _groups("uint4", 64),
         aliases="w_uint4_per_group_asym uint4_wo_64"),
    _row("uint4_wo_32", "uint4 weights in asymmetric groups of 32", _groups("uint4", 32)),
    _row("uint4_wo_128", "uint4 weights in asymmetric groups of 128", _groups("uint4", 128)),
    _row("uint4_wo_per_channel", "uint4 weights, asymmetric, per channel", _groups("uint4", -1)),
    _row("w4a16_sym", "int4 weights in symmetric groups of 64, activations untouched" + ON_SMALL, _groups("int4", 64),
         aliases="w_int4_per_group_sym int4_wo_64"),
    _row("int4_wo_32", "int4 weights in symmetric groups of 32", _groups("int4", 32)),
    _row("int4_wo_128", "int4 weights in symmetric groups of 128", _groups("int4", 128)),
    _row("int4_wo_per_channel", "int4 weights, symmetric, per channel", _groups("int4", -1),
         aliases="w_int4_per_channel_sym"),
    _row("w3a16", "3-bit weights in asymmetric groups of 64, activations untouched" + UNTRIED,
         _spec("int3", PER_GROUP, group_size=64, symmetric=False)),
    _row("w3a16_sym", "3-bit weights in symmetric groups of 64, activations untouched" + UNTRIED,
         _groups("int3", 64)),
    _row("w2a16", "2-bit weights in asymmetric groups of 64, activations untouched: loses much", _groups("uint2", 64)),
    _row("w2a16_sym", "2-bit weights in symmetric groups of 64, activations untouched: loses much",
         _groups("int2", 64)),
    _row("int4_wa_64", "int4 weights and activations in symmetric groups of 64, those of activations found at run time",
         _groups("int4", 64), _spec("int4", PER_GROUP, group_size=64, dynamic=True)),
    _row("int4_fp8", "int4 weights per channel over fp8 per tensor, fp8 activations found at run time" + ON_SMALL,
         _spec("int4", PER_CHANNEL, scale_type=ScaleType.float32, over=_spec("fp8_e4m3", scale_type=ScaleType.float32)),
         FP8_DYNAMIC),
    _row("mxfp4", "MXFP4 weights and activations: experimental (SmolLM2-135M: broken)", _mx("fp4"),
         _mx("fp4", dynamic=True)),
    _row("mxfp4_weight_only", "MXFP4 weights, activations untouched" + ON_SMALL, _mx("fp4")),
    _row("mxfp4_fp8", "MXFP4 weights, fp8 activations with one calibrated scale a tensor", _mx("fp4"), FP8),
    _row("mxfp4_mxfp6_e2m3", "MXFP4 weights, MXFP6 (e2m3) activations", _mx("fp4"), _mx("fp6_e2m3", dynamic=True)),
    _row("mxfp6_e3m2", "MXFP6 (e3m2) weights and activations", _mx("fp6_e3m2"), _mx("fp6_e3m2", dynamic=True)),
    _row("mxfp6_e2m3", "MXFP6 (e2m3) weights and activations", _mx("fp6_e2m3"), _mx("fp6_e2m3", dynamic=True)),
    _row("mxfp8", "MXFP8 (e4m3) weights and activations" + ON_SMALL, _mx("fp8_e4m3"), _mx("fp8_e4m3", dynamic=True),
         "w_mx_fp8_a_mx_fp8"),
    _row("mxfp8_e5m2", "MXFP8 (e5m2) weights and activations", _mx("fp8_e5m2"), _mx("fp8_e5m2", dynamic=True)),
    _row("mxint8", "MXINT8 weights and activations", _mx("int8"), _mx("int8", dynamic=True)),
    _row("mxint8_weight_only", "MXINT8 weights, activations untouched", _mx("int8")),
    _row("nvfp4", "NVFP4 weights and activations: fp4 in groups of 16 with e4m3 scales under one float32 scale"
         + ON_SMALL, _nvfp4(), _nvfp4(dynamic=True), "fp4_block16_scale_e4m3"),
    _row("nvfp4_weight_only", "NVFP4 weights, activations untouched" + ON_SMALL, _nvfp4()),
    _row("nf4", "NF4 weights of bitsandbytes in groups of 64", _groups("nf4", 64)),
    _row("nf4_double_quant", "NF4 weights of bitsandbytes in groups of 64, whose scales are quantized to 8 bits",
         _spec("nf4", PER_GROUP, group_size=64, scale_type=ScaleType.double_quant)),
    _row("llm_int8", "LLM.int8() of bitsandbytes: int8 weights per channel, int8 activations per token, found at run "
         "time, but for features with a value of 6 or more", INT8_CHANNEL, INT8_OUTLIERS),
    _row("fp4_bnb", "FP4 weights of bitsandbytes in groups of 64", _groups("fp4_bnb", 64)),
    _row("fp4_bnb_double_quant", "FP4 weights of bitsandbytes in groups of 64, whose scales are quantized to 8 bits",
         _spec("fp4_bnb", PER_GROUP, group_size=64, scale_type=ScaleType.double_quant)),
    _row("gguf_q2_k", "GGUF's Q2_K: uint2 weights in blocks of 16 with a minimum, 16 under one scale" + UNTRIED,
         GGUF_TYPES["Q2_K"], exclude=()),
    _row("gguf_q3_k", "GGUF's Q3_K: int3 weights in blocks of 16, 16 of them under one scale" + UNTRIED,
         GGUF_TYPES["Q3_K"], exclude=()),
    _row("gguf_iq4_xs", "GGUF's IQ4_XS: weights of 16 values in blocks of 32, 8 of them under one scale",
         GGUF_TYPES["IQ4_XS"], exclude=()),
    _row("gguf_iq4_nl", "GGUF's IQ4_NL: weights of 16 values, closer near zero, in blocks of 32", GGUF_TYPES["IQ4_NL"],
         exclude=()),
    _row("gguf_q4_0", "GGUF's Q4_0: int4 weights in blocks of 32" + ON_SMALL, GGUF_TYPES["Q4_0"], exclude=()),
    _row("gguf_q4_1", "GGUF's Q4_1: uint4 weights in blocks of 32 with a minimum", GGUF_TYPES["Q4_1"], exclude=()),
    _row("gguf_q5_0", "GGUF's Q5_0: int5 weights in blocks of 32", GGUF_TYPES["Q5_0"], exclude=()),
    _row("gguf_q5_1", "GGUF's Q5_1: uint5 weights in blocks of 32 with a minimum", GGUF_TYPES["Q5_1"], exclude=()),
    _row("gguf_q8_0", "GGUF's Q8_0: int8 weights in blocks of 32", GGUF_TYPES["Q8_0"], exclude=()),
    _row("gguf_q4_k", "GGUF's Q4_K: uint4 weights in blocks of 32 with a minimum, 8 of them under one scale",
         GGUF_TYPES["Q4_K"], exclude=()),
    _row("gguf_q5_k", "GGUF's Q5_K: uint5 weights in blocks of 32 with a minimum, 8 of them under one scale",
         GGUF_TYPES["Q5_K"], exclude=()),
    _row("gguf_q6_k", "GGUF's Q6_K: int6 weights in blocks of 16, 16 of them under one scale",
         GGUF_TYPES["Q6_K"], exclude=()),
)  # fmt: skip


def _mix(name: str, usual: str) -> Preset:
    """Return the preset of a named mix of llama.cpp, with this type of most tensors."""
    others = "all tensors" if usual in ("Q6_K", "Q8_0") else "most tensors, more bits in others"
    end = UNTRIED if name in ("Q2_K", "Q3_K_S") else ""
    config = Config(global_quant_config=QuantizationConfig(weight=GGUF_TYPES[usual]), gguf=GgufTypes(mix=name))
    return Preset(name, f"llama.cpp's {name}: {usual} in {others}, embedding included{end}", config)


PRESETS: dict[str, Preset] = {preset.name: preset for preset in (*_TABLE, *starmap(_mix, MIXES.items()))}

KV_CACHE_SPECS = {
    "fp8": FP8,
    "int8_per_tensor_static": INT8,
    "int8_per_channel_static": QuantizationSpec(dtype=Dtype.int8, qscheme=PER_CHANNEL, ch_axis=-1),
    "fp8_per_channel_static": QuantizationSpec(dtype=Dtype.fp8_e4m3, qscheme=PER_CHANNEL, ch_axis=-1),
    "int8_per_token_dynamic": INT8_TOKEN,
    "fp8_per_token_dynamic": FP8_TOKEN,
}
KV_CACHE_LAYERS = ("*k_proj", "*v_proj")

TOWER_PRESETS = {"int8": "int8_dynamic", "fp8": "fp8_dynamic"}
"""Scheme of towers -> the preset that says how their layers are quantized."""
DRAFT_PRESETS = {"fp8": "fp8_dynamic", "int8": "int8_dynamic", "int4": "w4a16_sym"}
"""Scheme of draft heads -> the preset that says how their layers are quantized."""


def _change(default: Any, label: str, *, flag: str, about: str, empty: str = "") -> Any:
    """Return a field of PresetChanges. ``label`` names it in the form, ``empty`` is shown there while it is not set."""
    return Field(default, title=label, description=about, json_schema_extra={"flag": flag, "empty": empty})


class PresetChanges(Settings):
    """The changes that a job can make to its preset. A new one is one field here, and its step in ``apply``.

    The flags (``quantcore.cli.flags``), the ``config`` of a request (``api.jobs.schemas.PresetConfig``) and the form of
    the dashboard (``make openapi``) follow from the fields, in their order.
    """

    group_size: StrictInt | None = _change(
        None,
        "Group size",
        flag="--group_size",
        about="group size of schemes with groups; -1 is the whole row (default: the scheme's)",
        empty="preset default",
    )
    kv_cache: str | None = _change(
        None,
        "KV cache",
        flag="--kv_cache_dtype",
        about=f"data type of the KV cache: {', '.join(KV_CACHE_SPECS)} (default: not quantized)",
        empty="not quantized",
    )
    towers: str | None = _change(
        None,
        "Image and sound encoders",
        flag="--quantize_towers",
        about=f"scheme of the encoders of images and sound: {', '.join(TOWER_PRESETS)} (default: not quantized)",
        empty="not quantized",
    )
    drafts: str | None = _change(
        None,
        "Draft heads (MTP)",
        flag="--quantize_drafts",
        about=f"scheme of the heads for multi-token prediction: {', '.join(DRAFT_PRESETS)} (default: not quantized)",
        empty="not quantized",
    )
    token_embedding_type: str | None = _change(
        None,
        "Embedding in GGUF files",
        flag="--token_embedding_type",
        about=f"GGUF type of the embedding: {', '.join(GGUF_TYPES)} (default: the scheme's; not quantized by gguf_*)",
        empty="scheme default",
    )
    output_type: str | None = _change(
        None,
        "Output projection in GGUF files",
        flag="--output_type",
        about="GGUF type of the output projection, which some models share with the embedding (default: the scheme's)",
        empty="scheme default",
    )
    exclude: tuple[str, ...] | None = _change(
        None,
        "Excluded layers",
        flag="--exclude_layers",
        about="globs of layers to leave unquantized, beside the preset's lm_head",
    )
    include: tuple[str, ...] = _change(
        (),
        "Included layers",
        flag="--include_layers",
        about="globs of layers to quantize although they are kept by default: lm_head, routers (see the plan)",
        empty="none",
    )

    @classmethod
    def flags(cls) -> dict[str, str]:
        """Return the flag of each field, as ``{"kv_cache": "--kv_cache_dtype"}``."""
        return {name: field["flag"] for name, field in cls.model_json_schema()["properties"].items()}

    def apply(self, config: Config) -> Config:
        """Return ``config`` with the changes.

        ``exclude`` is added to what ``config`` excludes (``lm_head``), of which ``include`` takes out what it names. An
        empty ``exclude`` means that nothing is excluded.

        Raises ConfigError: ``invalid_config`` for a group size of a scheme without groups, ``conflicting_schemes`` for
        a second scheme of the KV cache, ``unknown_kv_cache_scheme``, ``unknown_tower_scheme``,
        ``unknown_draft_scheme``, ``unknown_gguf_type``.
        """
        if self.group_size is not None:
            config = _with_group_size(config, self.group_size)
        config = _including(config, self.include) if self.include else config
        if self.exclude is not None:
            exclude = dict.fromkeys((*config.exclude, *self.exclude)) if self.exclude else ()
            config = replace(config, exclude=tuple(exclude))
        if self.kv_cache is not None:
            config = with_kv_cache(config, self.kv_cache)
        if self.towers is not None:
            config = replace(config, tower_quant_config=_layer_of("tower", self.towers, TOWER_PRESETS))
        if self.drafts is not None:
            config = replace(config, draft_quant_config=_layer_of("draft", self.drafts, DRAFT_PRESETS))
        types = {"token_embedding_type": self.token_embedding_type, "output_type": self.output_type}
        return _with_gguf_types(config, {field: kind for field, kind in types.items() if kind is not None})


def _layer_of(part: str, scheme: str, presets: Mapping[str, str]) -> QuantizationConfig:
    """Return the scheme of the layers in a ``part`` outside the decoder. Raises ConfigError ``unknown_..._scheme``."""
    if scheme not in presets:
        raise unknown_value(f"{part} scheme", scheme, presets, code=f"unknown_{part}_scheme", field=f"/config/{part}s")
    return PRESETS[presets[scheme]].layer_config


def _with_gguf_types(config: Config, types: Mapping[str, str]) -> Config:
    """Return ``config`` with these fields of GgufTypes. Raises ConfigError ``unknown_gguf_type``."""
    for field, kind in types.items():
        if kind.upper() not in GGUF_TYPES:
            raise unknown_value("GGUF type", kind, GGUF_TYPES, code="unknown_gguf_type", field=f"/config/{field}")
    return replace(config, gguf=replace(config.gguf or GgufTypes(), **types)) if types else config


def resolve(name: str, *, presets: Mapping[str, Preset] = PRESETS, **changes: Any) -> Config:
    """Return the config of a preset (or of one of its aliases), with ``changes``: the fields of PresetChanges.

    Names may be written in any case.

    Raises ConfigError ``unknown_preset``, and the errors of ``PresetChanges.apply``.
    """
    by_any_name = _by_any_name(presets)
    return PresetChanges(**changes).apply(by_any_name[spelled(name, presets)].config)


def spelled(name: str, presets: Mapping[str, Preset] = PRESETS) -> str:
    """Return the name or alias of a preset that is ``name`` in any case. Raises ConfigError ``unknown_preset``."""
    known = _by_any_name(presets)
    found = name if name in known else next((each for each in known if each.lower() == name.lower()), None)
    if found is None:
        raise unknown_value(
            "preset", name, known, code="unknown_preset", field="/config/preset", listed_by="`bitfoundry presets`"
        )
    return found


def _by_any_name(presets: Mapping[str, Preset]) -> dict[str, Preset]:
    return {alias: preset for preset in presets.values() for alias in (preset.name, *preset.aliases)}


def _including(config: Config, names: Iterable[str]) -> Config:
    """Return ``config`` with the layers that the globs ``names`` fit, whether a role or ``exclude`` keeps them.

    Of ``exclude`` only whole patterns are dropped: ``lm_head`` for ``lm_head`` or ``language_model.lm_head``.
    """
    names = tuple(names)
    still = tuple(pattern for pattern in config.exclude if not any(_is_named(pattern, name) for name in names))
    return replace(config, exclude=still, include=names)


def _is_named(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(pattern, name) or name.endswith(f".{pattern}")


def with_kv_cache(config: Config, scheme: str, layers: tuple[str, ...] = KV_CACHE_LAYERS) -> Config:
    """Return ``config`` with the outputs of key and value projections quantized as ``scheme`` (see KV_CACHE_SPECS).

    Their weights and inputs stay as in ``config``. Raises ConfigError if ``config`` already has a KV cache scheme.
    """
    if scheme not in KV_CACHE_SPECS:
        raise unknown_value(
            "kv_cache", scheme, KV_CACHE_SPECS, code="unknown_kv_cache_scheme", field="/config/kv_cache"
        )
    if config.kv_cache_quant_config:
        raise ConfigError(
            f"The config has its own KV cache (kv_cache_quant_config), and {scheme} was asked for besides.",
            code="conflicting_schemes",
            hint="Leave one of them out.",
            field="/config/kv_cache",
        )
    layer = QuantizationConfig(output_tensors=KV_CACHE_SPECS[scheme])
    return replace(config, kv_cache_quant_config=dict.fromkeys(layers, layer))


ATTENTION_SPECS = {"fp8": FP8}


def with_attention(config: Config, scheme: str, layers: tuple[str, ...] = ("*q_proj",)) -> Config:
    """Return ``config`` with fp8 attention: quantized outputs of the query projections, and attention probabilities.

    Each has one calibrated scale. vLLM reads the scales where the KV cache is fp8 as well (``with_kv_cache``).
    """
    if scheme not in ATTENTION_SPECS:
        raise unknown_value(
            "attention", scheme, ATTENTION_SPECS, code="unknown_attention_scheme", field="/config/attention"
        )
    spec = ATTENTION_SPECS[scheme]
    queries = replace(config.global_quant_config, output_tensors=spec)
    return replace(
        config,
        softmax_quant_spec=spec,
        layer_quant_config=dict.fromkeys(layers, queries) | config.layer_quant_config,
    )


def read_presets(path: Path) -> dict[str, Preset]:
    """Return PRESETS and those of a JSON file ``{"name": {"title": "...", "config": {...}}}``. Raises ConfigError.

    A ``config`` is a whole Config, or a preset with PresetChanges: ``{"preset": "w4a16", "group_size": 32}``.
    """
    try:
        rows = json.loads(path.read_text("utf-8"))
        presets = dict(PRESETS)
        for name, row in rows.items():
            if name in presets:
                raise ConfigError(
                    f"The preset '{name}' of {path} exists already.", code="invalid_presets", hint="Choose a new name."
                )
            presets[name] = Preset(name, str(row.get("title", name)), _read_config(row["config"], f"{path}, '{name}'"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file of presets: {error!r}.",
            code="invalid_presets",
            hint='It is JSON: {"name": {"title": "...", "config": {...}}}.',
        ) from error
    return presets


def _read_config(fields: dict[str, Any], place: str) -> Config:
    """Read the config of a user's preset. The message of a ConfigError begins with its ``place``."""
    try:
        if "preset" not in fields:
            return parse_config(fields)
        config = resolve(fields.pop("preset"))
        return PresetChanges(**fields).apply(config)
    except ConfigError as error:
        raise ConfigError(
            f"{place}: {error.message}", code=error.code, hint=error.hint, field=error.field, allowed=error.allowed
        ) from error


def _with_group_size(config: Config, group_size: int) -> Config:
    layer = config.global_quant_config
    if layer.weight is None or not _has_free_groups(layer.weight):
        free = [p.name for p in PRESETS.values() if p.layer_config.weight and _has_free_groups(p.layer_config.weight)]
        scheme = f"The scheme ({layer.weight.dtype} {layer.weight.qscheme})" if layer.weight else "The scheme"
        raise ConfigError(
            f"{scheme} has no groups whose size is free, so group_size {group_size} means nothing there.",
            code="invalid_config",
            hint=f"Leave it out, or take one of: {', '.join(free)}.",
            field="/config/group_size",
            allowed=free,
        )
    return replace(config, global_quant_config=replace(layer, weight=replace(layer.weight, group_size=group_size)))


def _has_free_groups(spec: QuantizationSpec) -> bool:
    return spec.qscheme is PER_GROUP and not (
        spec.scale_type in (ScaleType.e8m0, ScaleType.e4m3) or spec.scale_type.is_whole
    )
