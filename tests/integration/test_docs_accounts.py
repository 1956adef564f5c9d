"""The pages about accounts and webhooks: their examples run against a real service, their tables are true."""

import ipaddress
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.http.security import ROLES, SCOPES
from api.settings import Settings
from api.store.accounts import projects, webhooks
from api.store.tables.jobs import Project
from tests.support.docs import DOCS, Shell, blocks_of, read_page
from tests.support.receiver import Receiver, serve
from tests.support.service import ROOT, Server

ACCOUNTS, WEBHOOKS = ((DOCS / "how-to" / name).read_text() for name in ("accounts.md", "webhooks.md"))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_networks": (ipaddress.ip_network("127.0.0.0/8"),)})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serve() as receiver:
        yield receiver


@pytest.mark.slow
def test_the_shell_about_accounts(server: Server, tmp_path: Path) -> None:
    printed = read_page("how-to/accounts.md", tmp_path, HUB_TOKEN="hf_secret", **server.environment).output
    assert len(re.findall(r"^bf_[0-9a-f]{12}_[\w-]{43}$", printed, flags=re.MULTILINE)) == 3
    assert "search" in printed and "hub_token.put" in printed and "key.revoke" in printed
    assert "viewer" in printed and "Deleted mem_" in printed
    assert "hf_secret" not in printed
    assert (tmp_path / "secret.key").stat().st_mode & 0o777 == 0o600
    [private] = [block for block in blocks_of("how-to/accounts.md") if block.language == "sh" and block.reason]
    shell = Shell(tmp_path, server.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(AssertionError, match="hub_"):  # there is no Hub here, and no such model
        shell.run(private.script)
    shell.close()


@pytest.mark.slow
def test_the_service_listens_as_the_page_says(settings: Settings, sessions: Any) -> None:
    [block] = [block for block in blocks_of("how-to/expose.md") if block.language == "console"]
    environment = os.environ | {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "BROKER_URL": settings.broker_url.get_secret_value(),
        "BITFOUNDRY_DATA_DIR": str(settings.data_dir),
    }
    done = subprocess.run(
        [sys.executable, *block.script.split()[1:]], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, block.shown)


def test_the_tables() -> None:
    quotas = re.findall(r"^\| `(\w+_\w+)` \|", ACCOUNTS, flags=re.MULTILINE)
    assert set(quotas) == {*projects.QUOTAS, "requests_per_minute"}
    assert set(quotas) <= {*Project.__table__.columns.keys()}
    assert re.findall(r"^\| `([a-z:]+)` \| (?:see|submit|chat|manage)", ACCOUNTS, flags=re.MULTILINE) == list(SCOPES)
    roles = re.findall(r"^\| `([a-z]+)` \| (`jobs:read`.*) \|$", ACCOUNTS, flags=re.MULTILINE)
    assert {role: tuple(re.findall("`(.*?)`", scopes)) for role, scopes in roles} == ROLES


@pytest.mark.slow
def test_the_page_about_webhooks(server: Server, receiver: Receiver, tmp_path: Path) -> None:
    reading = read_page("how-to/webhooks.md", tmp_path, show=("SECRET",), RECEIVER=receiver.url, **server.environment)
    assert "delivered" in reading.output
    secret, check = reading.variables["SECRET"], reading.names["is_from_bitfoundry"]
    [message] = receiver.wait(1)
    assert check(message.headers, message.body, secret)
    assert not check(message.headers, message.body + b" ", secret)
    assert not check(message.headers | {"webhook-timestamp": "1700000000"}, message.body, secret)
    assert set(re.findall(r"`((?:job|model)\.\w+)`", WEBHOOKS)) == set(webhooks.EVENT_TYPES)
    delays = re.search(r"tried again after (.*?), each", WEBHOOKS)
    assert delays
    units = {"s": 1, "min": 60, "h": 3600}
    shown = [int(number) * units[unit] for number, unit in re.findall(r"(\d+) (s|min|h)\b", delays[1])]
    assert tuple(shown) == webhooks.RETRY_AFTER_S
