"""The rules for schemas are those of jsonschema, as far as they go; other keywords are refused."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from quantcore.data.json_schema import fault_of_schema, fits

FILM = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1},
        "year": {"type": "integer", "minimum": 1888},
        "genres": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "rating": {"anyOf": [{"type": "null"}, {"type": "number", "maximum": 10}]},
        "kind": {"enum": ["film", "series"]},
    },
    "required": ["title", "year"],
    "additionalProperties": False,
}
VALUES: list[Any] = [
    {"title": "Alien", "year": 1979},
    {"title": "Alien", "year": 1979.0, "genres": ["horror"], "rating": 8.5, "kind": "film"},
    {"title": "Alien", "year": True},
    {"title": "", "year": 1979},
    {"title": "Alien", "year": "1979"},
    {"title": "Alien", "year": 1800},
    {"title": "Alien", "year": 1979, "genres": []},
    {"title": "Alien", "year": 1979, "genres": ["a", 2]},
    {"title": "Alien", "year": 1979, "rating": None},
    {"title": "Alien", "year": 1979, "rating": 11},
    {"title": "Alien", "year": 1979, "kind": "book"},
    {"title": "Alien", "year": 1979, "director": "Scott"},
    {"title": "Alien"},
    [],
    "Alien",
    None,
]
SCHEMAS: list[dict[str, Any]] = [
    FILM,
    {},
    {"type": ["string", "null"]},
    {"type": "array", "minItems": 1},
    {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    {"const": "Alien", "title": "a film"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_it_judges_as_jsonschema_does(schema: dict[str, Any]) -> None:
    assert fault_of_schema(schema) is None
    expected = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in VALUES]
    assert [fits(value, schema) for value in VALUES] == expected


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ([], "schema is not an object"),
        ({"type": "object", "properties": {"a": {"pattern": "a+"}}}, "schema.properties.a has the keyword 'pattern'"),
        ({"type": "text"}, "schema.type is none of object, array"),
        ({"items": {"anyOf": {}}}, "schema.items.anyOf is not a list"),
        ({"minItems": "3"}, "schema.minItems is not a number"),
        ({"$ref": "#/$defs/a"}, "has the keyword '$ref'; allowed are"),
    ],
)
def test_a_schema_that_would_be_checked_in_part_is_refused(schema: object, fault: str) -> None:
    assert fault in (fault_of_schema(schema) or "")
