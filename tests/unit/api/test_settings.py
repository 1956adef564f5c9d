"""What the settings of the environment say when they are not there."""

import pytest

from api import __main__ as api
from api.settings import read_settings
from quantcore.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("https://bitfoundry.example.org/", True),
        ("http://10.0.0.1:8000/quant", True),
        ("bitfoundry.example.org", False),
        ("javascript:alert(1)", False),
        ("https://u:p@example.org", False),
        ("https://example.org/?a=b", False),
        ("https://example.org/a|b>", False),
    ],
)
def test_a_public_address_begins_links(monkeypatch: pytest.MonkeyPatch, url: str, is_allowed: bool) -> None:
    names = {"DATABASE_URL": "postgresql://x", "BROKER_URL": "redis://x", "BITFOUNDRY_DATA_DIR": "/x"}
    for name, value in (names | {"BITFOUNDRY_PUBLIC_URL": url}).items():
        monkeypatch.setenv(name, value)
    if is_allowed:
        assert read_settings().public_url == url.rstrip("/")
        return
    with pytest.raises(ConfigError, match="BITFOUNDRY_PUBLIC_URL"):
        read_settings()


def test_missing_settings_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://somewhere")
    for name in ("BROKER_URL", "BITFOUNDRY_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as refusal:
        read_settings()
    assert refusal.value.code == "invalid_settings" and "DATABASE_URL" not in refusal.value.message
    assert api.main(["serve"]) == 1
    told = capsys.readouterr().err
    assert "BROKER_URL (this field is required)" in told and "BITFOUNDRY_DATA_DIR" in told and "Traceback" not in told
