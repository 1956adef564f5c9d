"""Named schemes and the changes of them that a job can ask for; users can add schemes of their own from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import Field, StrictInt

from quantcore.config.gguf_types import GGUF_TYPES, GgufTypes
from quantcore.config.preset_table import FP8, FP8_CHANNEL, FP8_TOKEN, INT8, INT8_CHANNEL, INT8_TOKEN, PRESETS, Preset
from quantcore.config.quantization import (
    Config,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    parse_config,
)
from quantcore.config.values import Settings
from quantcore.errors import ConfigError, unknown_value

__all__ = [
    "ATTENTION_SPECS",
    "DRAFT_PRESETS",
    "KV_CACHE_LAYERS",
    "KV_CACHE_SPECS",
    "PRESETS",
    "TOWER_PRESETS",
    "Preset",
    "PresetChanges",
    "read_presets",
    "resolve",
    "spelled",
    "with_attention",
    "with_kv_cache",
]

KV_CACHE_SPECS = {
    "fp8": FP8,
    "int8_per_tensor_static": INT8,
    "int8_per_channel_static": replace(INT8_CHANNEL, ch_axis=-1),
    "fp8_per_channel_static": replace(FP8_CHANNEL, ch_axis=-1),
    "int8_per_token_dynamic": INT8_TOKEN,
    "fp8_per_token_dynamic": FP8_TOKEN,
}
FLOAT_FILES = ("f16", "bf16", "f32")
"""llama.cpp's names of GGUF files that hold floats."""

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
    if "," in name and name not in known:
        raise ConfigError(
            f"'{name}' names several presets, and one is needed here.",
            code="unknown_preset",
            hint="`bitfoundry quantize` takes several. In the service, a sweep makes a job of each: its matrix is"
            ' {"/config/preset": ["Q4_K_M", "Q8_0"]}.',
            field="/config/preset",
        )
    if name.lower() in FLOAT_FILES:
        raise ConfigError(
            f"'{name}' files are not quantized, and every preset quantizes.",
            code="unknown_preset",
            hint="Q8_0 is the nearest preset for llama.cpp. Its own convert_hf_to_gguf.py writes a GGUF file of floats:"
            f" --outtype {name.lower()}.",
            field="/config/preset",
        )
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
    return spec.qscheme is QSchemeType.per_group and not (spec.scale_type.in_one_byte or spec.scale_type.is_whole)
