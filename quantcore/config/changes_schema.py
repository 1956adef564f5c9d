"""Prints the JSON schema of PresetChanges, of which the dashboard makes its form.

``python -m quantcore.config.changes_schema``, started by ``make openapi``.
"""

from __future__ import annotations

import json

from quantcore.config.presets import PresetChanges


def document() -> str:
    """Return the JSON schema as text. ``title`` and ``empty`` of a field are its label and its placeholder."""
    return json.dumps(PresetChanges.model_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    print(document(), end="")
