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

from api.http.security import SCOPES
from api.settings import Settings
from api.store.accounts import projects, webhooks
from api.store.tables.jobs import Project
from tests.support.docs import blocks, run
from tests.support.receiver import Receiver, serve
from tests.support.service import ROOT, Server

ACCOUNTS, WEBHOOKS = ((ROOT / "docs" / name).read_text() for name in ("accounts.md", "webhooks.md"))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_networks": (ipaddress.ip_network("127.0.0.0/8"),)})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serve() as receiver:
        yield receiver


def test_the_shell_about_accounts(server: Server, tmp_path: Path) -> None:
    scripts = blocks(ACCOUNTS, "sh")
    [private] = [script for script in scripts if "org/private-model" in script]
    done = run("".join(script for script in scripts if script != private), server, tmp_path, HUB_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(re.findall(r"^bf_[0-9a-f]{12}_[\w-]{43}$", done.stdout, flags=re.MULTILINE)) == 2
    assert "search" in done.stdout and "hub_token.put" in done.stdout and "key.revoke" in done.stdout
    assert "hf_secret" not in done.stdout + done.stderr
    assert (tmp_path / "secret.key").stat().st_mode & 0o777 == 0o600
    refused = run(private, server, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert refused.returncode == 1 and "hub_" in refused.stderr  # there is no Hub here, and no such model


def test_the_service_listens_as_the_page_says(settings: Settings, sessions: Any) -> None:
    [shown] = blocks(ACCOUNTS, "console")
    command, said = shown.removeprefix("$ ").split("\n", 1)
    environment = os.environ | {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "BROKER_URL": settings.broker_url.get_secret_value(),
        "BITFOUNDRY_DATA_DIR": str(settings.data_dir),
    }
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, said)


def test_the_tables() -> None:
    quotas = re.findall(r"^\| `(\w+_\w+)` \|", ACCOUNTS, flags=re.MULTILINE)
    assert set(quotas) == {*projects.QUOTAS, "requests_per_minute"}
    assert set(quotas) <= {*Project.__table__.columns.keys()}
    assert re.findall(r"^\| `([a-z:]+)` \| (?:see|submit|manage)", ACCOUNTS, flags=re.MULTILINE) == list(SCOPES)


def test_the_page_about_webhooks(server: Server, receiver: Receiver, tmp_path: Path) -> None:
    [script] = blocks(WEBHOOKS, "sh")
    done = run(f'{script}\necho "$SECRET"', server, tmp_path, RECEIVER=receiver.url)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "delivered" in done.stdout
    secret = done.stdout.split()[-1]
    names: dict[str, Any] = {}
    for block in blocks(WEBHOOKS, "python"):
        exec(compile(block, "docs/webhooks.md", "exec"), names)
    check = names["is_from_bitfoundry"]
    [message] = receiver.wait(1)
    assert check(message.headers, message.body, secret)
    assert not check(message.headers, message.body + b" ", secret)
    assert not check(message.headers | {"webhook-timestamp": "1700000000"}, message.body, secret)
    assert set(re.findall(r"`(job\.\w+)`", WEBHOOKS)) == set(webhooks.EVENT_TYPES)
    delays = re.search(r"tried again after (.*?), each", WEBHOOKS)
    assert delays
    units = {"s": 1, "min": 60, "h": 3600}
    shown = [int(number) * units[unit] for number, unit in re.findall(r"(\d+) (s|min|h)\b", delays[1])]
    assert tuple(shown) == webhooks.RETRY_AFTER_S
