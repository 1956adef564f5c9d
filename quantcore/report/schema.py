"""Prints the JSON schema of report.json, from its types: ``python -m quantcore.report.schema``. No torch."""

from __future__ import annotations

import json

from quantcore.report.values import Report


def document() -> str:
    """Return the JSON schema as text."""
    schema = Report.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


if __name__ == "__main__":
    print(document(), end="")
