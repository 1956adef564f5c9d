"""``python -m api.openapi``: prints the OpenAPI document from the code alone, as the dashboard's types need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import SecretStr

from api.main import create_app
from api.settings import Settings


def app_of_nothing() -> FastAPI:
    """Return the app only for its OpenAPI document: it is connected to nothing."""
    settings = Settings(
        database_url=SecretStr("postgresql+psycopg://nobody@/nothing"),
        broker_url=SecretStr("redis://nowhere"),
        data_dir=Path("/nowhere"),
    )
    return create_app(settings)


def document() -> str:
    """Return the document as JSON, without examples, and without problems: those all look the same."""
    openapi = app_of_nothing().openapi()
    for methods in openapi["paths"].values():
        for operation in methods.values():
            answers = operation["responses"]
            operation["responses"] = {status: answers[status] for status in answers if status.startswith(("2", "3"))}
    return json.dumps(_without_examples(openapi), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _without_examples(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_examples(member) for name, member in value.items() if name not in ("example", "examples")
        }
    return [_without_examples(member) for member in value] if isinstance(value, list) else value


if __name__ == "__main__":
    print(document(), end="")
