"""JSON Schema (draft 2020-12) of a model's answers, by the library jsonschema. No torch.

A schema may refer to its own parts (``$defs``), and to nothing else: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def fault_of_schema(schema: object) -> str | None:
    """Return what is wrong with a schema in a few words, such as ``schema.type: 'text' is not valid``; or None."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    if not isinstance(schema, dict):
        return "schema is not an object"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in error.absolute_path)
        return f"schema{place}: {error.message[:200]}"
    own = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in _references(schema):
        try:
            own.lookup(reference)
        except (Unresolvable, ValueError):
            return f"schema refers to '{reference[:100]}', which is no part of it"
    return None


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True for a value that keeps a schema of which ``fault_of_schema`` is None."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return bool(Draft202012Validator(dict(schema), registry=Registry()).is_valid(value))


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (part[name] for name in ("$ref", "$dynamicRef") if isinstance(part.get(name), str))
        part = list(part.values())
    for each in part if isinstance(part, list) else ():
        yield from _references(each)
