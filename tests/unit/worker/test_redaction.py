"""What must never be stored."""

import sys
from pathlib import Path

import pytest

from api.settings import Settings
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


def test_only_what_is_named_a_secret_is_taken_from_the_environment(tmp_path: Path) -> None:
    environment = {
        "HF_TOKEN": "tok-12345678",
        "DB_PASSWORD": "pass-word-1",
        "PATH": "/usr/bin-long",
        "A_TOKEN": "1234567",
    }
    redactor = Redactor.of_worker(_settings(tmp_path), environment)
    given = " ".join(environment.values())
    assert redactor.clean(given) == f"{MASK} {MASK} /usr/bin-long 1234567"


def test_every_string_of_an_event_is_cleaned() -> None:
    data = {"a": ["hf_abcdefABCDEF", {"hf_abcdefABCDEF": 1}], "n": 3, "none": None, "flag": True}
    assert Redactor().clean_all(data) == {"a": [MASK, {MASK: 1}], "n": 3, "none": None, "flag": True}


def test_folders_of_the_server_have_names(tmp_path: Path) -> None:
    redactor = Redactor.of_worker(_settings(tmp_path), {})
    for given, kept in {
        f"{tmp_path}/work/job_1/output": "<data>/work/job_1/output",
        f"cannot read '{tmp_path}'.": "cannot read '<data>'.",
        f'File "{sys.prefix}/lib/x.py"': 'File "<python>/lib/x.py"',
        f"{tmp_path}-other and {tmp_path}2": f"{tmp_path}-other and {tmp_path}2",
        "/srv/models/llama": "/srv/models/llama",
    }.items():
        assert redactor.clean_all({"message": given}) == {"message": kept}


def _settings(data_dir: Path) -> Settings:
    return Settings(database_url="postgresql://", broker_url="redis://", data_dir=data_dir)
