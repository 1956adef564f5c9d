"""Dependencies that hang, lie or fill up: a broker that is stopped, foreign keys and messages in it, full disks."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import event, text

from api.http import rate_limit, stream_permits
from api.http.health import WRITES, Readiness
from api.http.security import create_key
from api.http.stream_permits import StreamPermits
from api.main import create_app
from api.settings import Settings
from api.store.accounts import projects
from api.store.engine import Sessions, connect
from api.store.queue import outbox
from api.store.queue.outbox import WAKE, Undelivered
from api.store.queue.wakeups import QUEUE, make_celery, sender
from api.store.tables.jobs import Job
from bitfoundry.local.stack import Valkey
from quantcore.config import time_limits
from quantcore.hub import session as hub_session
from tests.support.api import bearer, body, post
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


GARBAGE: list[bytes] = [
    b"\xff\xfe no message",
    b"null",
    b"[1]",
    b'{"body": "x", "properties": {}}',
    b"[" * 100_000,
]


def envelope(body: bytes, **headers: str) -> bytes:
    properties = {"body_encoding": "base64", "delivery_tag": "1", "delivery_info": {"exchange": "", "routing_key": "x"}}
    message = {"body": base64.b64encode(body).decode(), "content-type": "application/json", "properties": properties}
    return json.dumps(message | {"content-encoding": "utf-8", "headers": headers}).encode()


def test_whatever_is_in_the_queue_the_worker_goes_on_listening(
    settings: Settings, valkey: Valkey, sessions: Sessions, make_model: Callable[..., Path],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """It hardly polls: what it does, it does because it was woken. What ended the listening is in its log."""
    own = on(valkey, settings, poll_s=600, lease_s=1800)
    worker = start_worker(own)
    queue = redis.Redis(unix_socket_path=valkey.url.removeprefix("redis+socket://"))
    with TestClient(create_app(on(valkey, settings)), headers=bearer(create_key(sessions, "k"))) as client:
        wait_for(post(client, make_model("first")), "succeeded")
        for garbage in GARBAGE:
            queue.lpush(QUEUE, garbage)
            wait_until(lambda: queue.llen(QUEUE) == 0)
        wait_for(post(client, make_model("second")), "succeeded")
        queue.delete(QUEUE)
        queue.set(QUEUE, "of another type")
        wait_until(lambda: worker.log.read_text().count("WRONGTYPE") > 0)
        queue.delete(QUEUE)
        wait_for(post(client, make_model("third")), "succeeded")
    queue.close()
    assert worker.log.read_text().count("It starts again; meanwhile jobs are found by polling.") >= 3


def test_a_message_is_not_unpacked(
    settings: Settings, valkey: Valkey, start_worker: Callable[..., WorkerProcess], sessions: Sessions
) -> None:
    """Half a gigabyte of zeros in half a megabyte: it wakes the worker, and that is all."""
    worker = start_worker(on(valkey, settings))
    queue = redis.Redis(unix_socket_path=valkey.url.removeprefix("redis+socket://"))
    wait_until(lambda: len(queue.client_list()) > 1)
    deflate = zlib.compressobj(9)
    block = bytes(64 << 20)
    packed = b"".join([*(deflate.compress(block) for _ in range(8)), deflate.flush()])
    for name in ("application/x-gzip", "gzip", "application/x-bz2", "xz"):
        queue.lpush(QUEUE, envelope(packed, compression=name))
    wait_until(lambda: queue.llen(QUEUE) == 0 and queue.hlen("unacked") == 0)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker.process.pid}/status").read_text())
    assert peak is not None and int(peak[1]) < 300_000
    queue.close()


def test_foreign_keys_lock_no_project_out(settings: Settings, valkey: Valkey, sessions: Sessions) -> None:
    """Counters of another type, without an end, or of things that never were: they are not ours, and are deleted."""
    queue = redis.Redis(unix_socket_path=valkey.url.removeprefix("redis+socket://"))
    requests, streams = rate_limit.KEY + projects.DEFAULT, stream_permits.KEY + projects.DEFAULT
    permits = StreamPermits(valkey.url)
    with TestClient(create_app(on(valkey, settings)), headers=bearer(create_key(sessions, "k"))) as client:
        for name, value in ((requests, b"9999999999"), (requests, b"text"), (streams, b"text")):
            queue.set(name, value)
            assert client.get("/v1/jobs").status_code == 200
            permits.release(projects.DEFAULT, permits.acquire(projects.DEFAULT, 2, 0))
        queue.delete(requests)
        queue.lpush(requests, "x")
        assert client.get("/v1/jobs").status_code == 200
        assert client.get("/v1/jobs").headers["RateLimit"]
    queue.zadd(streams, {f"foreign{number}": time.time() + 1e9 for number in range(5)})
    held = [permits.acquire(projects.DEFAULT, 2, 0) for _ in range(2)]
    with pytest.raises(projects.QuotaExceeded):
        permits.acquire(projects.DEFAULT, 2, 0)
    assert permits.count(projects.DEFAULT, 0) == len(held)
    permits.close()
    queue.close()


def test_ready_means_that_a_job_could_be_taken_in(
    settings: Settings, valkey: Valkey, sessions: Sessions, make_model: Callable[..., Path]
) -> None:
    """A database that may only be read is not ready; a broker that takes no messages costs time."""
    queue = redis.Redis(unix_socket_path=valkey.url.removeprefix("redis+socket://"))
    with TestClient(create_app(on(valkey, settings)), headers=bearer(create_key(sessions, "k"))) as client:

        def parts() -> tuple[int, str, str, str]:
            answer = client.get("/healthz/ready")
            return answer.status_code, *(answer.json()[name] for name in ("status", "database", "broker"))

        assert parts() == (200, "ok", "ok", "ok")
        queue.config_set("maxmemory", 1)  # and what is in it is not thrown away
        assert parts() == (200, "degraded", "ok", "takes_no_messages")
        queue.config_set("maxmemory", 0)
        queue.replicaof("127.0.0.1", "1")
        assert parts() == (200, "degraded", "ok", "takes_no_messages")
        queue.replicaof("NO", "ONE")
        assert parts() == (200, "ok", "ok", "ok")
        change = "ALTER DATABASE {} SET default_transaction_read_only = {}"
        with sessions.begin() as session:
            name = session.scalar(text("SELECT current_database()"))
        try:
            execute(sessions, change.format(name, "on"))
            wait_until(lambda: parts() == (503, "failed", "read_only", "ok"), note=parts)
            refused = client.post("/v1/jobs", json=body(make_model()))
            assert refused.status_code == 503, refused.text
            assert client.get("/v1/jobs").status_code == 200
        finally:
            execute(sessions, "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE", change.format(name, "off"))
        wait_until(lambda: parts() == (200, "ok", "ok", "ok"))
    queue.close()


FULL = (
    "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ "
    "BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$",
    "CREATE TRIGGER full_disk BEFORE INSERT ON write_probe EXECUTE FUNCTION full_disk()",
)


def test_ready_writes_to_the_database_and_keeps_nothing(settings: Settings, sessions: Sessions) -> None:
    """A full disk lets a database answer; the fault matrix has a real one, this is the error that it gives."""
    readiness = Readiness(sessions, make_celery(settings.broker_url.get_secret_value()))
    written: list[str] = []

    @event.listens_for(sessions.kw["bind"], "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        written.extend([statement] if statement in WRITES else [])

    first, second = (asyncio.run(readiness.ask()) for _ in range(2))
    assert (first.database, second.database) == ("ok", "ok")
    assert written == list(WRITES), "not at each request: anyone may ask"
    with sessions.begin() as session:
        assert session.scalar(text("SELECT count(*) FROM write_probe")) == 0
    execute(sessions, *FULL)
    try:
        wait_until(lambda: asyncio.run(readiness.ask()).database == "full")
    finally:
        execute(sessions, "DROP FUNCTION full_disk CASCADE")
    wait_until(lambda: asyncio.run(readiness.ask()).database == "ok")


def execute(sessions: Sessions, *statements: str) -> None:
    """Execute the statements on a connection of their own, and end all others: they begin anew with the settings."""
    with sessions.kw["bind"].connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        connection.detach()
