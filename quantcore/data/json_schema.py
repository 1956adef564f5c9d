"""JSON Schema, as far as the answers of a model need it: checks a schema, and values against it. No torch.

The keywords are those of draft 2020-12 that say which types, fields and values there may be. A schema with any other
keyword is refused, because what it demands would not be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_NOTES = frozenset({"$schema", "$id", "title", "description", "default", "examples", "deprecated"})
_CHECKED = frozenset({
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "minimum", "maximum", "minLength", "maxLength", "anyOf",
})  # fmt: skip


def fault_of_schema(schema: object, place: str = "schema") -> str | None:
    """Return what is wrong with a schema in a few words, such as ``schema.items has an unknown keyword``; or None."""
    if not isinstance(schema, dict):
        return f"{place} is not an object"
    if unknown := sorted(schema.keys() - _NOTES - _CHECKED):
        return f"{place} has the keyword '{unknown[0][:50]}'; allowed are {', '.join(sorted(_CHECKED))}"
    types = schema.get("type", [])
    if any(each not in _TYPES for each in (types if isinstance(types, list) else [types])):
        return f"{place}.type is none of {', '.join(_TYPES)}"
    shapes = {"properties": dict, "required": list, "enum": list, "anyOf": list}
    for name, shape in shapes.items():
        if name in schema and not isinstance(schema[name], shape):
            return f"{place}.{name} is not {'an object' if shape is dict else 'a list'}"
    for name in ("minItems", "maxItems", "minimum", "maximum", "minLength", "maxLength"):
        if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
            return f"{place}.{name} is not a number"
    return next(filter(None, (fault_of_schema(part, f"{place}.{name}") for name, part in _parts_of(schema))), None)


def _parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield from ((f"properties.{name}", part) for name, part in schema.get("properties", {}).items())
    yield from ((f"anyOf[{number}]", part) for number, part in enumerate(schema.get("anyOf", [])))
    if "items" in schema:
        yield "items", schema["items"]
    if "additionalProperties" in schema and not isinstance(schema["additionalProperties"], bool):
        yield "additionalProperties", schema["additionalProperties"]


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True for a value that keeps a schema of which ``fault_of_schema`` is None."""
    types = schema.get("type")
    if types is not None and not any(_is(value, each) for each in (types if isinstance(types, list) else [types])):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    if "anyOf" in schema and not any(fits(value, each) for each in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema)
    if isinstance(value, list):
        items = schema.get("items", {})
        return _is_within(len(value), schema, "Items") and all(fits(item, items) for item in value)
    if isinstance(value, str):
        return _is_within(len(value), schema, "Length")
    is_number = _is(value, "number")
    return not is_number or schema.get("minimum", value) <= value <= schema.get("maximum", value)


def _object_fits(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if any(name not in value for name in schema.get("required", [])):
        return False
    if others is False and not value.keys() <= known.keys():
        return False
    rules = {name: known.get(name, others if isinstance(others, dict) else {}) for name in value}
    return all(fits(value[name], rules[name]) for name in value)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _is_within(size: int, schema: Mapping[str, Any], of: str) -> bool:
    most: int | float = schema.get(f"max{of}", size)
    return bool(schema.get(f"min{of}", 0) <= size <= most)
