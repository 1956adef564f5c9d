"""Describes presets as the list of presets shows them."""

from __future__ import annotations

from typing import Any

from quantcore.config.preset_table import Preset
from quantcore.config.recipes import EFFORTS, recipe
from quantcore.export import formats_for


def describe(preset: Preset) -> dict[str, Any]:
    """Return a preset as JSON data: its config, the algorithms of each effort, and the formats that can hold it."""
    return {
        "name": preset.name,
        "title": preset.title,
        "aliases": list(preset.aliases),
        "needs_calibration": preset.needs_calibration,
        "recipes": {effort: [each.to_dict() for each in recipe([preset.config], effort)] for effort in EFFORTS},
        "exports": formats_for(preset.config),
        "config": preset.config.to_dict(),
    }
