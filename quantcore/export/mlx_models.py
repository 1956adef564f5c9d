"""The models that mlx-lm has a class for, as far as ``model_type`` says it.

``mlx_models.json`` is made by tests/consumers/mlx_model_types.py, and compared with the installed mlx-lm by a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
VERSION: str = _TABLE["version"]
"""The version of mlx-lm with these classes."""
MODEL_TYPES = frozenset[str](_TABLE["model_types"])


def why_not_loaded(model_config: Mapping[str, Any]) -> str | None:
    """Return why mlx-lm does not load a model with this config.json, as the end of a sentence; None if it may."""
    model_type = str(model_config.get("model_type"))
    if model_type not in MODEL_TYPES:
        return f"mlx-lm {VERSION} has no class for model_type '{model_type}'"
    return None
