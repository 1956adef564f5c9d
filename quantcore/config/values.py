"""Base classes of all configs: strict fields, null for "the default", and errors in plain sentences. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from quantcore.errors import ConfigError, nearest_names

STRICT = ConfigDict(extra="forbid")
_MAX_SHOWN = 80  # characters of a wrong value in a message

T = TypeVar("T")


class Checked(type):
    """Metaclass of ``Value``: a call of the class with wrong arguments raises ConfigError, never pydantic's error.

    Positional values become fields in the order of the class. Only direct calls come through here: pydantic does not
    call the classes of nested data, so that an error there keeps its whole path.
    """

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        by_position: dict[str, Any] = {}
        if args:
            by_position = _by_position(cls, args, kwargs)
        try:
            made: T = type.__call__(cls, **by_position, **kwargs)
        except ValidationError as error:
            raise config_error(error, cls.__name__, fields=_names(cls)) from error
        return made


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Value(metaclass=Checked):
    """A frozen config that checks itself: JSON out, and null for "the default" as in the JSON of other tools."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data without the fields that are null."""
        data: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json", exclude_none=True)
        return data

    def __init_subclass__(cls, **_: Any) -> None:
        cls.__repr__ = Value.__repr__  # type: ignore[method-assign]  # dataclasses would make one with every field

    def __repr__(self) -> str:
        """Return the shortest call that makes an equal value: without the fields that the others imply."""
        needed = {name: getattr(self, name) for name in _names(type(self))}
        for name in list(needed):
            fewer = {other: value for other, value in needed.items() if other != name}
            with suppress(ConfigError):
                needed = fewer if type(self)(**fewer) == self else needed
        parts = (f"{name}={(str(value) if isinstance(value, StrEnum) else value)!r}" for name, value in needed.items())
        return f"{type(self).__name__}({', '.join(parts)})"


class Settings(BaseModel):
    """Base of frozen pydantic models whose constructor raises ConfigError, as that of ``Value`` does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # type checkers know the fields better than this signature

        def __init__(self, *args: Any, **fields: Any) -> None:
            if args:
                _by_position(type(self), args, fields)
            try:
                super().__init__(**fields)
            except ValidationError as error:
                name = type(self).__name__
                raise config_error(error, name, fields=type(self).model_fields) from error

        __init__.__pydantic_base_init__ = True  # nested data does not come through here, so errors keep their path


def given_fields(values: Any) -> Any:
    """Return the fields that were set, by the constructor or in JSON, as a dict without nulls."""
    if isinstance(values, ArgsKwargs):
        values = dict(values.kwargs or {})
    return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


def config_error(
    error: ValidationError,
    what: str,
    *,
    code: str = "invalid_config",
    hint: str = "",
    prefix: str = "",
    fields: Any = (),
) -> ConfigError:
    """Return a ConfigError for the first problem that pydantic found; ``field`` is its JSON pointer below ``prefix``.

    ``what`` names the validated value, ``fields`` are the names of its possible fields, if they are known.
    """
    problems = error.errors(include_url=False)
    # An unknown field, such as a typo, explains the other problems.
    first = next((problem for problem in problems if problem["type"] in _UNKNOWN_FIELD), problems[0])
    pointer = prefix + "".join(f"/{part}" for part in first["loc"])
    names = list(fields) if len(first["loc"]) == 1 and first["type"] in _UNKNOWN_FIELD else []
    hints = [hint] if hint else []
    if names:
        near = nearest_names(first["loc"][-1], names, 1)
        hints.insert(0, (f"Did you mean '{near[0]}'? " if near else "") + f"Its fields: {', '.join(names)}.")
    if len(problems) > 1:
        hints.append(f"There are {len(problems)} problems in all.")
    return ConfigError(
        f"{what} is not valid at {pointer or '/'}: {sentence_of(first)}.",
        code=code,
        hint=" ".join(hints),
        field=pointer,
        allowed=names or allowed_words(first),
    )


_UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_keyword_only_argument", "missing_argument", "missing_positional_only_argument")


def sentence_of(problem: Mapping[str, Any]) -> str:
    """Describe a problem of pydantic's in plain words, without a full stop: what is allowed, and what was given."""
    kind, text = problem["type"], str(problem["msg"])
    if kind in _UNKNOWN_FIELD:
        return "there is no such field"
    if kind in _MISSING:
        return "this field is required"
    if kind == "unexpected_positional_argument":
        return "fields are given by name"
    if kind in ("value_error", "assertion_error"):
        return text.partition(", ")[2] or text
    if kind in ("union_tag_not_found", "missing_discriminator"):
        return "`name` is missing"
    text = _IN_JSON.get(kind, text)
    expected = allowed_words(problem)
    rule = f"it can be {', '.join(expected)}" if expected else _rule(text)
    if kind == "string_pattern_mismatch":
        rule = f"it must be {form_of(problem['ctx']['pattern'])}"
    if "input" not in problem or kind == "json_invalid":
        return rule
    return f"{rule}; {shown(problem['input'])} was given"


_OBJECT, _LIST = "it must be an object such as {...}", "it must be a list such as [...]"
_TEXT, _WHOLE, _NUMBER = "it must be a text in quotes", "it must be a whole number", "it must be a number"
_TRUTH = "it must be true or false"
_IN_JSON = {
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), _OBJECT),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"), _LIST),
    **dict.fromkeys(("string_type", "string_sub_type"), _TEXT),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), _NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _TRUTH),
    "none_required": "it must be null",
    "invalid_key": "its names must be texts in quotes",
}
"""Kinds of problems of pydantic's whose messages name types of Python, in the words of JSON."""


def fields_at(kind: Any, path: Iterable[object]) -> list[str]:
    """Return the fields that data of this type can have at ``path``: [] where it has none of its own.

    Parts of the path that are no fields, such as numbers of items, lead into the items of lists and objects.
    """
    classes = _classes_of(kind)
    for part in path:
        below = [_fields_of(each)[part] for each in classes if part in _fields_of(each)]
        classes = [each for field in below for each in _classes_of(field.annotation)] if below else classes
    return list(dict.fromkeys(name for each in classes for name in _fields_of(each)))


def form_of(pattern: str) -> str:
    """Describe a regular expression of a field in words, as ``an id such as job_0123...``."""
    if kind := re.fullmatch(r"\^([a-z]+)_\[0-9a-f\]\{32\}\$", pattern):
        return f"an id: {kind[1]}_ and 32 hex digits"
    return FORMS.get(pattern, f"text that matches {pattern}")


FORMS = {
    r"^(prj_[0-9a-f]{32}|all)$": "the id of a project, prj_ and 32 hex digits, or all",
    r"^[0-9a-f]{12}$": "the id of a key: 12 hex digits",
    r"^[0-9a-f]{64}$": "a SHA-256: 64 lower-case hex digits",
    r"^([0-9a-f]{40})?$": "a commit: 40 hex digits",
    r"^[0-9]{1,18}$": "a number of at most 18 digits",
    r"^G[0-9]+$": "the id of a gate, such as G1",
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "a name of lower-case letters, digits, '.', '_' and '-', such as support-bot",
    r"^([1-9][0-9]{0,8}|[a-z][a-z0-9-]{0,62})$": "the number of a version or an alias, such as 3 or production",
    r"\S": "text that is not blank",
    r"^[ -~]+$": "printable ASCII characters",
    r"^[a-z][a-z0-9-]{0,62}$": "a name: a lower-case letter, then at most 62 lower-case letters, digits and dashes",
    r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$": "a branch, tag or commit: letters, digits and ._/-, up to 128",
    r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}$": "a name: letters, digits and _.:-, up to 100",
    r"^[A-Za-z0-9._:-]{1,300}$": "the id of a worker: letters, digits and ._:-, up to 300",
}
"""The patterns of fields, in words."""


def shown(value: object) -> str:
    """Return a short text of a value for a message: its class if it is not a plain JSON value."""
    text = repr(str(value)) if isinstance(value, str) else repr(value)
    if not isinstance(value, str | int | float | bool | list | tuple | dict | type(None)):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _rule(text: str) -> str:
    text = re.sub(r"^Input should be ", "it must be ", text)
    text = re.sub(r"^[A-Z][a-z]+ should have (.*?)( after validation)?(, not more)?(?=,|$)", r"it must have \1", text)
    return text[:1].lower() + text[1:].rstrip(".")


def allowed_words(problem: Mapping[str, Any]) -> list[str]:
    """Return the allowed values of a problem of pydantic's that is about an enumeration."""
    context = problem.get("ctx") or {}
    if problem["type"] in ("enum", "literal_error"):
        return re.findall(r"'([^']*)'", str(context.get("expected"))) or [str(context.get("expected"))]
    if problem["type"] == "union_tag_invalid":
        return re.findall(r"'([^']*)'", str(context.get("expected_tags")))
    return []


def _classes_of(kind: Any) -> list[Any]:
    """Return the classes with fields that an annotation names, in unions, lists and objects as well."""
    if _fields_of(kind):
        return [kind]
    return [each for part in get_args(kind) for each in _classes_of(part)]


def _fields_of(cls: Any) -> dict[Any, Any]:
    fields = getattr(cls, "__pydantic_fields__", None)
    return fields if isinstance(fields, dict) else {}


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _by_position(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``args`` by field name. Raises ConfigError if they are too many, or a field is given twice."""
    if not dataclasses.is_dataclass(cls):
        names, order = list(cls.model_fields), []
    else:
        names = _names(cls)
        order = [field.name for field in dataclasses.fields(cls) if field.init and not field.kw_only]
    twice = [name for name in order[: len(args)] if name in kwargs]
    if len(args) <= len(order) and not twice:
        return dict(zip(order, args, strict=False))
    if twice:
        message = f"{cls.__name__} was given '{twice[0]}' twice, by position and by name."
    elif order:
        message = f"{cls.__name__} takes {len(order)} value(s) by position ({', '.join(order)}), but got {len(args)}."
    else:
        message = f"{cls.__name__} takes its fields by name, but got {len(args)} value(s) by position."
    raise ConfigError(
        message,
        code="invalid_config",
        hint=f"Pass fields by name: {', '.join(names)}.",
        allowed=names,
        field=f"/{twice[0]}" if twice else "",
    )
