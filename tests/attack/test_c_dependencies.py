"""Dependencies that hang, lie or fill up: a broker that is stopped, foreign keys and messages in it, full disks."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import text

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions, connect
from api.store.queue import outbox
from api.store.queue.outbox import WAKE, Undelivered
from api.store.queue.wakeups import make_celery, sender
from api.store.tables.jobs import Job
from bitfoundry.local.stack import Valkey
from quantcore.config import time_limits
from quantcore.hub import session as hub_session
from tests.support.api import post
from tests.support.service import WorkerProcess
from tests.support.waiting import wait_until

SLACK_S = 20.0
"""On top of a limit, on a machine that has much else to do; what has no limit takes for ever."""


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A broker that may be stopped and killed."""
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as home:
        server = Valkey(Path(home))
        server.start()
        yield server
        if server._process is not None:
            server._process.send_signal(signal.SIGCONT)
        server.stop()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections, reads all, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def on(valkey: Valkey, settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"broker_url": SecretStr(valkey.url), **changes})


def stop(valkey: Valkey) -> None:
    assert valkey._process is not None
    valkey._process.send_signal(signal.SIGSTOP)


def ask_database(port: int) -> None:
    with connect(f"postgresql+psycopg://x@127.0.0.1:{port}/x").begin() as session:
        session.execute(text("SELECT 1"))


def ask_broker(port: int) -> None:
    sender(make_celery(f"redis://127.0.0.1:{port}/0"))(WAKE, {"v": 1})


def ask_hub(port: int) -> None:
    with hub_session.make_client() as client:
        client.get(f"http://127.0.0.1:{port}/api/models/a/b")


@pytest.mark.parametrize(
    ("ask", "limit_s"),
    [(ask_database, time_limits.DATABASE_CONNECT_S), (ask_broker, time_limits.BROKER_S), (ask_hub, 1.0)],
)
def test_nobody_waits_for_ever_for_who_says_nothing(
    ask: Callable[[int], None], limit_s: float, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_session, "HUB_TRANSFER_S", 1.0)
    ended: list[Exception] = []

    def run() -> None:
        try:
            ask(silent)
        except Exception as error:
            ended.append(error)

    threading.Thread(target=run, daemon=True).start()
    wait_until(lambda: ended, timeout_s=2 * limit_s + SLACK_S)
    assert "imeout" in repr(ended) or isinstance(ended[0], Undelivered), ended


def test_a_broker_that_hangs_stops_nobody_but_itself(
    settings: Settings, valkey: Valkey, sessions: Sessions, make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job], get_job: Callable[[str], Job],
) -> None:  # fmt: skip
    """The reaper takes a lost job back, heartbeats go on, jobs are taken in and done, and the probe answers."""
    own = on(valkey, settings, lease_s=6, slots=2)
    with TestClient(create_app(own), headers={"Authorization": f"Bearer {create_key(sessions, 'k')}"}) as client:
        lost = post(client, make_model("lost", mode="slow"))
        first = start_worker(own)
        wait_for(lost, "running")
        stop(valkey)
        with sessions.begin() as session:
            outbox.wake(session)  # a message that cannot be sent
        first.kill()
        start_worker(own)
        wait_until(lambda: get_job(lost).lost_count == 1, timeout_s=own.lease_s + SLACK_S)
        ready = client.get("/healthz/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["broker"]) == (200, "degraded", "unreachable")
        wait_for(post(client, make_model("new")), "succeeded")
        assert valkey._process is not None
        valkey._process.send_signal(signal.SIGCONT)
        wait_until(lambda: client.get("/healthz/ready").json()["broker"] == "ok")
