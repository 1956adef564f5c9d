"""What the settings of the environment say when they are not there."""

import pytest

from api import __main__ as api
from api.settings import read_settings
from quantcore.errors import ConfigError


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
