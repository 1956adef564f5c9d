"""Exporters: one file for each on-disk format.

Importing them needs no torch, so that a plan can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quantcore.checkpoint.besides import CODE
from quantcore.config.layer_plan import LayerPlan, usual_layers
from quantcore.config.preset_table import PRESETS
from quantcore.config.quantization import Config
from quantcore.errors import ConfigError
from quantcore.export.exporter import (
    EXPORTERS,
    Container,
    Decoder,
    Exporter,
    FileContents,
    Fitting,
    OwnConfig,
    OwnFiles,
    Uniform,
    encoded,
    file_layouts,
    file_of,
    holds_codes,
    layouts_of,
    readers_of,
    tensor_name,
)

__all__ = [
    "EXPORTERS",
    "Container",
    "Decoder",
    "Exporter",
    "FileContents",
    "Fitting",
    "Uniform",
    "adapted",
    "check_exports",
    "check_fitted",
    "default_format",
    "encoded",
    "file_layouts",
    "file_of",
    "formats_for",
    "holds_codes",
    "json_files",
    "layouts_of",
    "readers_of",
    "tensor_name",
]


def formats_for(*configs: Config) -> list[str]:
    """Return the formats that can hold common layers of all ``configs``, first the one that most programs load.

    Those without codes come last.
    """
    return _formats_of([layer for config in configs for layer in usual_layers(config)])


def _formats_of(layers: Sequence[LayerPlan]) -> list[str]:
    """Return the formats that can hold ``layers``, in the order of ``formats_for``."""
    fitting = [name for name in EXPORTERS if layers and _holds(EXPORTERS.get(name), layers)]

    def place(name: str) -> tuple[bool, bool, int]:
        readers = readers_of(name)
        return not holds_codes(name), not readers.prefers(layers), readers.preference

    return sorted(fitting, key=place)


def default_format(*configs: Config) -> str:
    """Return the format that most programs load directly for the schemes of ``configs``.

    Where no format holds their codes, it is one whose refusal names what can be done.
    """
    first = min(EXPORTERS, key=lambda name: readers_of(name).preference)
    return next(filter(holds_codes, formats_for(*configs)), first)


def _holds(exporter: Exporter, layers: Sequence[LayerPlan]) -> bool:
    if any(map(partial(_refuse, exporter), layers)):
        return False
    if not isinstance(exporter, Uniform):
        return True
    first, *others = map(exporter.same_everywhere, layers)
    return all(settings == first for settings in others)


def json_files(
    export: str, model_config: Mapping[str, Any], config: Config, layers: tuple[LayerPlan, ...], kept: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return the JSON files that describe a checkpoint, by name.

    config.json is the model's own, with ``Exporter.quantization_config`` in it. It names no code (``auto_map``) for a
    model that Transformers has a class for: such files are not copied.
    """
    from transformers import CONFIG_MAPPING

    if model_config.get("model_type") in CONFIG_MAPPING:
        model_config = {key: value for key, value in model_config.items() if key != CODE}
    exporter = EXPORTERS.get(export)
    quantization_config = exporter.quantization_config(config, layers, kept)
    if quantization_config is None:
        return {"config.json": dict(model_config)}
    described = {**model_config, "quantization_config": quantization_config}
    if isinstance(exporter, OwnConfig):
        described |= exporter.own_config(model_config, quantization_config)
    own = exporter.own_files(quantization_config) if isinstance(exporter, OwnFiles) else {}
    return {"config.json": described, **own}


def adapted(layers: tuple[LayerPlan, ...], exports: Sequence[str]) -> tuple[tuple[LayerPlan, ...], tuple[str, ...]]:
    """Adapt the layers to the exports that have a form of their own for some settings; returns them with warnings."""
    warnings: tuple[str, ...] = ()
    for export in exports:
        if isinstance(exporter := EXPORTERS.get(export), Fitting):
            layers, more = exporter.adapt(layers)
            warnings += more
    return layers, warnings


def check_fitted(layers: Sequence[LayerPlan], export: str) -> None:
    """Raise ConfigError for layers that were solved already and would have to be ``adapted`` to the format."""
    fitted, _ = adapted(tuple(layers), (export,))
    odd = next((old for old, new in zip(layers, fitted, strict=True) if old != new), None)
    if odd is not None:
        raise ConfigError(
            f"The {export} format cannot store {odd.name} ({odd.scheme}) as it is: its whole zero points would be"
            " rounded.",
            code="incompatible_export",
            hint=f"Quantize the original model for this format: bitfoundry quantize --model_export {export}. In a "
            "config, set zero_point_type float32.",
            field="/export",
        )


def check_exports(
    layers: Sequence[LayerPlan], exports: Sequence[str], before: Sequence[LayerPlan] | None = None
) -> None:
    """Raise ConfigError for no format, a format named twice, or one that cannot hold these layers.

    ``before`` are the layers before they were ``adapted``, if they were: of these the error says what can hold them.
    """
    if not exports or len(set(exports)) != len(exports):
        raise ConfigError(
            f"export is {list(exports)}; it needs at least one format, each named once.",
            code="invalid_export",
            hint=f"Formats: {', '.join(EXPORTERS)}.",
            field="/export",
            allowed=EXPORTERS,
        )
    for name in exports:
        exporter = EXPORTERS.get(name)
        reasons = {reason: layer for layer in reversed(layers) if (reason := _refuse(exporter, layer))}
        if reasons:
            reason, layer = next(iter(reasons.items()))
            fitting = _formats_of(layers if before is None else before)
            raise ConfigError(
                f"The {name} format cannot store {layer.name} ({layer.scheme}): {reason}.",
                code="incompatible_export",
                hint=f"{_presets_for(name, layer)} Formats that can store these layers:"
                f" {', '.join(fitting) or 'none'}.",
                field="/export",
                allowed=fitting,
            )
        if isinstance(exporter, Uniform):
            _check_uniform(name, exporter, layers)


def _presets_for(export: str, layer: LayerPlan) -> str:
    """Say which presets a format can hold, first those with the dtype of ``layer``."""
    fitting = [preset for preset in PRESETS.values() if export in formats_for(preset.config)]
    fitting.sort(key=lambda preset: getattr(preset.layer_config.weight, "dtype", None) != layer.weight.dtype)
    names = [preset.name for preset in fitting]
    more = f" and {len(names) - MAX_PRESETS} more" if len(names) > MAX_PRESETS else ""
    return f"Presets that {export} can store: {', '.join(names[:MAX_PRESETS]) or 'none'}{more}."


MAX_PRESETS = 10
"""Number of presets that an error lists."""


def _refuse(exporter: Exporter, layer: LayerPlan) -> str | None:
    """Return why the format cannot hold ``layer``; None if it can."""
    if layer.is_in_draft and isinstance(exporter, Container):
        return "it stores only the model, without draft heads"
    return exporter.refuse(layer)


def _check_uniform(export: str, exporter: Uniform, layers: Sequence[LayerPlan]) -> None:
    first = exporter.same_everywhere(layers[0])
    for layer in layers:
        settings = exporter.same_everywhere(layer)
        if settings != first:
            setting = next(key for key in first if settings[key] != first[key])
            raise ConfigError(
                f"The {export} format has one {setting} for all layers, but {layers[0].name} has {first[setting]}"
                f" and {layer.name} {settings[setting]}.",
                code="incompatible_export",
                hint=f"Set the same {setting} for all layers, exclude some, or use another format.",
                field="/export",
            )
