"""Schemas of answers: what is kept, what is refused, and that nothing is fetched."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from pydantic import BaseModel, Field

from quantcore.data.json_schema import fault_of_schema, fits


class Person(BaseModel):
    name: str = Field(pattern="^[A-Z]")


class Film(BaseModel, extra="forbid"):
    title: str = Field(min_length=1)
    year: int = Field(ge=1888)
    director: Person | None = None


SCHEMA = Film.model_json_schema()
"""As people have them: with parts that it refers to."""


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        ({"title": "Alien", "year": 1979}, True),
        ({"title": "Alien", "year": 1979.0, "director": {"name": "Scott"}}, True),
        ({"title": "Alien", "year": True}, False),
        ({"title": "", "year": 1979}, False),
        ({"title": "Alien", "year": 1800}, False),
        ({"title": "Alien", "year": 1979, "director": {"name": "scott"}}, False),
        ({"title": "Alien", "year": 1979, "rating": 9}, False),
        ({"title": "Alien"}, False),
        ([], False),
        (None, False),
    ],
    ids=str,
)
def test_what_keeps_a_schema(value: Any, is_kept: bool) -> None:
    assert fault_of_schema(SCHEMA) is None
    assert fits(value, SCHEMA) == is_kept


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ([], "schema is not an object"),
        ({"type": "text"}, "schema.type: 'text' is not valid"),
        ({"properties": {"a": {"minItems": "3"}}}, "schema.properties.a.minItems: '3' is not of type 'integer'"),
        ({"items": {"$ref": "#/$defs/a"}}, "schema refers to '#/$defs/a', which is no part of it"),
        ({"$ref": "http://127.0.0.1:9/a"}, "schema refers to 'http://127.0.0.1:9/a', which is no part of it"),
        ({"$ref": "file:///etc/passwd"}, "schema refers to 'file:///etc/passwd', which is no part of it"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(
    schema: object, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("nothing is fetched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert fault in (fault_of_schema(schema) or "")
