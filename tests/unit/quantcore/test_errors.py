"""What an error of the engine says, and where it says it."""

import pytest

from quantcore.errors import QuantError


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        ("Unknown preset 'fp9'.", "/config", "Unknown preset 'fp9' (at /config). Try fp8."),
        ("The config is not valid at /gate: no.", "/gate", "The config is not valid at /gate: no. Try fp8."),
        ("The scheme in /config.", "/config", "The scheme in /config. Try fp8."),
        ("Cannot read /config.json.", "/config", "Cannot read /config.json (at /config). Try fp8."),
        ("The disk is full.", "", "The disk is full. Try fp8."),
    ],
)
def test_an_error_names_the_fault_and_its_field_once(message: str, field: str, text: str) -> None:
    assert str(QuantError(message, code="x", field=field, hint="Try fp8.")) == text


def test_one_allowed_word_is_one_value() -> None:
    assert QuantError("No.", code="x", allowed="fp8").allowed == ("fp8",)
    assert QuantError("No.", code="x", allowed=(32, "fp8")).allowed == ("32", "fp8")
