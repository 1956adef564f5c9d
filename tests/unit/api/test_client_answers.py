"""The answers of the Python client are made from the schemas of the API, and take what another version sends."""

import subprocess
from typing import Any

import pytest

from api import client_answers
from api.client_answers import Module
from bitfoundry.client.answers import Job
from tests.support.sources import ROOT


def test_the_client_has_the_answers_of_the_api_as_it_is() -> None:
    for path, text in client_answers.modules().items():
        assert path.read_text() == text, f"the API has changed: run `make openapi` ({path.name})"


def test_what_is_generated_is_marked() -> None:
    paths = [*client_answers.modules(), ROOT / "dashboard" / "openapi.json", ROOT / "dashboard" / "preset-changes.json"]
    shown = subprocess.run(
        ["git", "check-attr", "linguist-generated", *map(str, paths)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(shown) == len(paths) and all(line.endswith(": set") for line in shown)


def made_of(properties: dict[str, Any], **more: Any) -> list[str]:
    """Return the fields of a class, in lines."""
    schema = {"description": "A.", "properties": properties}
    text = Module("model_answers", {"FolderOut": schema, **more})._class("FolderOut")
    return [line.strip() for line in text.splitlines()[3:]]


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        ({"type": "string", "format": "date-time"}, "x: str"),
        ({"type": "boolean", "default": False}, "x: bool = False"),
        ({"type": "string", "default": "warn"}, 'x: str = "warn"'),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]}, "x: int | float | None = None"),
        ({"type": "array", "items": {"type": "object"}}, "x: list[dict[str, Any]] = Field(default=[])"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "x: dict[str, int] = Field(default={})"),
        ({"$ref": "#/components/schemas/ParentOut"}, "x: ParentResult"),
        ({"anyOf": [{"$ref": "#/components/schemas/Other"}, {"type": "null"}]}, "x: dict[str, Any] | None = None"),
        ({}, "x: Any"),
    ],
)
def test_a_schema_becomes_a_type(schema: dict[str, Any], line: str) -> None:
    empty = {"type": "object", "properties": {}}
    assert made_of({"x": schema}, Other=empty, ParentOut=empty) == [line]


def test_a_secret_that_is_shown_once_is_none_later() -> None:
    later = {"properties": {"id": {"type": "string"}}}
    made = {"description": "A.", "properties": {**later["properties"], "key": {"type": "string"}}}
    text = Module("project_answers", {"NewKeyOut": made, "KeyOut": later})._class("NewKeyOut")
    assert [line.strip() for line in text.splitlines()[3:5]] == ["id: str", "key: str | None = None"]


def test_descriptions_and_words_become_docstrings() -> None:
    words = {"type": "string", "enum": ["ready", "ended", "gone"]}
    assert made_of({"x": {"$ref": "#/components/schemas/Words"}}, Words=words) == [
        "x: str", '"""`ready`, `ended` or `gone`."""',
    ]  # fmt: skip
    assert made_of({"x": {"type": "integer", "description": "``y`` is null."}})[1] == '"""`y` is None."""'


def test_an_answer_takes_the_words_and_fields_of_another_version() -> None:
    job = Job.model_validate(
        {
            "id": "job_1", "state": "state_of_tomorrow", "priority": 5, "pinned": False, "attempt": 1,
            "cancel_requested": False, "created_at": "2026-11-21T12:00:00Z", "a_field_of_tomorrow": 1,
        }
    )  # fmt: skip
    assert (job.state, job.labels, job.summary, job.model_extra) == (
        "state_of_tomorrow", {}, None, {"a_field_of_tomorrow": 1},
    )  # fmt: skip
