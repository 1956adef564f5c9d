"""What must never be stored."""

import pytest

from worker.redaction import MASK, Redactor

KEY = "bf_0123456789ab_" + "x" * 43


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("token hf_abcdefABCDEF0123456789 used", f"token {MASK} used"),
        (f"key {KEY}.", f"key {MASK}."),
        ("Authorization: Bearer abc.def-123456", f"Authorization: Bearer {MASK}"),
        ("authorization: basic dXNlcjpwYXNz", f"authorization: basic {MASK}"),
        ("postgresql://me:pw@host/db?x=1", f"postgresql://{MASK}@host/db?x=1"),
        ("https://h/f?X-Amz-Signature=abc123&id=7", f"https://h/f?X-Amz-Signature={MASK}&id=7"),
        ("https://h/f?a=1&token=abc123", f"https://h/f?a=1&token={MASK}"),
        ("my own-secret-value.", f"my {MASK}."),
        ("own-secret-value-and-more", MASK),
        ("https://host/path@2 and user@host", "https://host/path@2 and user@host"),
        ("model.layers.3.hf_x quantized", "model.layers.3.hf_x quantized"),
    ],
)
def test_secrets_are_masked_and_the_rest_is_kept(given: str, kept: str) -> None:
    assert Redactor(["own-secret-value", "own-secret-value-and-more"]).clean(given) == kept


def test_only_what_is_named_a_secret_is_taken_from_the_environment() -> None:
    environment = {
        "HF_TOKEN": "tok-12345678",
        "DB_PASSWORD": "pass-word-1",
        "PATH": "/usr/bin-long",
        "A_TOKEN": "1234567",
    }
    redactor = Redactor.of_environment(environment)
    given = " ".join(environment.values())
    assert redactor.clean(given) == f"{MASK} {MASK} /usr/bin-long 1234567"


def test_every_string_of_an_event_is_cleaned() -> None:
    data = {"a": ["hf_abcdefABCDEF", {"hf_abcdefABCDEF": 1}], "n": 3, "none": None, "flag": True}
    assert Redactor().clean_all(data) == {"a": [MASK, {MASK: 1}], "n": 3, "none": None, "flag": True}
