"""What an error of the service says, and where it says it."""

from typing import Any

import pytest

from bitfoundry.errors import ApiError

PRESET = {"pointer": "#/config/preset", "detail": "Unknown preset 'fp9'.", "allowed": ["fp8", "w4a16"]}


@pytest.mark.parametrize(
    ("detail", "entry", "text"),
    [
        ("Unknown preset 'fp9'.", PRESET, "Unknown preset 'fp9' (at /config/preset)."),
        ("Not valid at /config/preset: no.", PRESET | {"detail": ""}, "Not valid at /config/preset: no."),
        ("Not valid.", {"parameter": "limit", "detail": "Too small"}, "Not valid. Too small (at limit)."),
        ("Nothing here.", {}, "Nothing here."),
    ],
)
def test_an_error_of_the_service_names_the_fault_and_its_field(detail: str, entry: dict[str, Any], text: str) -> None:
    assert str(ApiError(422, {"detail": detail, "errors": [entry]})) == text


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ({"pointer": "#/gate"}, "'maybe' was given. Try warn."),
        ({"pointer": "#/evaluation/tasks/1"}, "'../x' was given. Try warn."),
        ({"pointer": "#/hub_token"}, "Try warn."),
        ({"pointer": "#/evaluation"}, "Try warn."),
        ({"pointer": "#/none/0"}, "Try warn."),
        ({"parameter": "limit"}, "-1 was given. Try warn."),
    ],
)
def test_an_error_of_the_service_has_the_value_that_was_sent_and_the_hint(field: dict[str, str], given: str) -> None:
    sent = {"gate": "maybe", "evaluation": {"tasks": ["a", "../x"]}, "hub_token": "hf_secret", "limit": -1}
    error = ApiError(422, {"detail": "It is not valid.", "hint": "Try warn.", "errors": [field]}, sent)
    place = field.get("pointer", "").removeprefix("#") or field["parameter"]
    assert str(error) == f"It is not valid (at {place}). {given}"


def test_the_values_of_a_sweep_are_those_of_its_axes() -> None:
    values = {"/config": {"preset": "fp9"}, "/a~1b": 3}
    error = ApiError(422, {}, {"job": {"calibration": {"samples": 4}}, "matrix": {}})
    places = {
        "#/job/config/preset": "'fp9'", "#/job/a~1b": "3", "#/job/calibration/samples": "4", "#/job/configs": "",
    }  # fmt: skip
    assert {place: error.given_at({"pointer": place, "values": values}) for place in places} == places


def test_an_error_of_the_service_has_its_field_and_what_is_allowed() -> None:
    error = ApiError(422, {"detail": "No.", "errors": [PRESET]})
    assert (error.field, error.allowed) == ("/config/preset", ["fp8", "w4a16"])
    assert (ApiError(0, {}).field, ApiError(0, {}).allowed) == ("", [])
    assert ApiError(422, {"errors": [{"allowed": "'a' or 'b'"}]}).allowed == ["'a' or 'b'"]
