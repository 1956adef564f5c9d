"""The operator's file for the OpenID provider: what it may say, and what is said about what it may not."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from api.oidc.config import read_config
from api.settings import Settings
from quantcore.errors import ConfigError

GRANT = {"claim": "groups", "value": "ml-team", "project": "search", "role": "editor"}
CONFIG: dict[str, Any] = {
    "name": "Keycloak",
    "issuer": "https://login.example.org/realms/ml",
    "client_id": "bitfoundry",
    "grants": [GRANT],
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "oidc.json"
    file.write_text(json.dumps(CONFIG | changes))
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert config.scopes == ("openid", "email")
    assert config.grants[0].role == "editor"
    assert read_config(write(tmp_path, issuer="http://127.0.0.1:9000")).issuer == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"issuer": "http://login.example.org"}, "issuer: must be an https address"),
        ({"issuer": "https://u:p@login.example.org"}, "issuer: must be"),
        ({"issuer": "login.example.org"}, "issuer: must be"),
        ({"issuer": "https://["}, "issuer: "),
        ({"scopes": ["email"]}, "scopes: must contain 'openid'"),
        ({"scopes": ["openid", "a b"]}, "scopes.1: "),
        ({"grants": []}, "grants: "),
        ({"grants": [GRANT | {"role": "owner"}]}, "grants.0.role: "),
        ({"grants": [{"claim": "groups"}]}, "grants.0.value: this field is required"),
        ({"client_secret": "x"}, "client_secret: there is no such field"),
        ({"name": "a\nb"}, "name: must be printable"),
    ],
)
def test_a_fault_is_named_with_its_place(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(write(tmp_path, **changes))
    assert refused.value.code == "invalid_oidc_file"
    assert told in refused.value.message and "oidc.json" in refused.value.message


def test_a_file_that_is_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "nothing.json")
    (tmp_path / "oidc.json").write_text("{")
    with pytest.raises(ConfigError, match="the file"):
        read_config(tmp_path / "oidc.json")


def settings_with(folder: Path, **chosen: Any) -> Settings:
    return Settings(database_url=SecretStr("x"), broker_url=SecretStr("x"), data_dir=folder, **chosen)


def test_the_settings_need_all_that_belongs_together(tmp_path: Path) -> None:
    assert settings_with(tmp_path).oidc is None
    secret = tmp_path / "client.secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    whole = {"oidc_file": write(tmp_path), "oidc_client_secret_file": secret, "public_url": "https://b.example.org"}
    client = settings_with(tmp_path, **whole).oidc
    assert client is not None
    assert client.redirect_uri == "https://b.example.org/ui/sign-in"
    assert client.secret.get_secret_value() == "s3cret" and "s3cret" not in repr(client)
    for name, told in (("oidc_client_secret_file", "OIDC_CLIENT_SECRET"), ("public_url", "BITFOUNDRY_PUBLIC_URL")):
        with pytest.raises(ConfigError, match=told):
            _ = settings_with(tmp_path, **whole | {name: None}).oidc
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        _ = settings_with(tmp_path, **whole).oidc
