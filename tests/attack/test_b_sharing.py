"""One user against all: connections, streams, readers of files, and events that no database takes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi.testclient import TestClient

from api.http import connection_limits, event_stream, turns
from api.http.security import create_key
from api.jobs import stream as job_stream
from api.main import NUM_THREADS
from api.readers import Readers
from api.store.engine import Sessions
from api.store.queue import control, events
from api.store.queue.events import NewEvent
from api.store.tables.jobs import Job, Project
from quantcore.errors import ModelError
from tests.support.api import post
from tests.support.service import Server, WorkerProcess
from tests.support.waiting import wait_until

Submit = Callable[..., str]
OTHER = "prj_" + "b" * 32


@pytest.fixture
def other_key(sessions: Sessions) -> str:
    """The key of another project than the attacker's."""
    with sessions.begin() as session:
        session.add(Project(id=OTHER, name="b"))
    return create_key(sessions, "b", project_id=OTHER)


@contextmanager
def connection(server: Server, path: str, key: str, *, until: bytes) -> Iterator[socket.socket]:
    """A connection of its own with a request whose answer has come as far as ``until``."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        heard = b""
        while until not in heard:
            heard += line.recv(65536)
            assert b" 200 OK" in heard.partition(b"\r\n")[0], heard
        yield line


def stream(server: Server, job_id: str) -> AbstractContextManager[socket.socket]:
    """An event stream of the attacker, once its first line has come."""
    return connection(server, f"/v1/jobs/{job_id}/events/stream", server.key, until=b"retry:")


def is_open(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        while data := line.recv(65536):
            assert data
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_many_streams_of_one_caller_keep_nobody_out(
    server: Server, other_key: str, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections are streams of one key: each newcomer takes the place of one of them, and of nobody else."""
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 20)
    job_id = submit()
    with ExitStack() as stack:
        few = stack.enter_context(httpx2.Client(base_url=server.url, trust_env=False, timeout=20))
        headers = {"Authorization": f"Bearer {other_key}"}
        assert few.get("/v1/jobs", headers=headers).status_code == 200
        kept = stack.enter_context(connection(server, "/v1/presets", other_key, until=b'"data"'))
        lines = [stack.enter_context(stream(server, job_id)) for _ in range(25)]
        wait_until(lambda: sum(map(is_open, lines)) <= 20)
        for method, path, body in (
            ("GET", "/healthz/live", None),
            ("GET", "/healthz/ready", None),
            ("POST", "/v1/sign-in", {"api_key": other_key}),
            ("GET", "/v1/jobs", None),
        ):
            answer = httpx2.request(method, server.url + path, json=body, headers=headers, trust_env=False, timeout=20)
            assert answer.status_code in (200, 201), answer.text
        assert few.get("/v1/jobs", headers=headers).status_code == 200
        assert any(map(is_open, lines)) and is_open(kept)


def test_a_key_has_a_limit_of_streams(server: Server, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_stream.MAX_STREAMS_OF_KEY <= connection_limits.MAX_CONNECTIONS // 4
    monkeypatch.setattr(event_stream, "MAX_STREAMS_OF_KEY", 3)
    job_id = submit()
    with ExitStack() as stack, server.connect() as client:
        for _ in range(3):
            stack.enter_context(stream(server, job_id))
        refused = client.get(f"/v1/jobs/{job_id}/events/stream")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
        assert refused.headers["Retry-After"]


def test_who_waits_for_a_reader_takes_no_thread(
    server: Server, other_key: str, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More inspections of one project than the API has threads, of which the first does not end."""
    over = threading.Event()

    def inspect_slowly(*given: Any, **named: Any) -> Any:
        over.wait(60)
        raise ModelError("It cannot be read.", code="unreadable_model")

    monkeypatch.setattr(Readers, "inspect", inspect_slowly)
    path = str(make_model())
    monkeypatch.setattr(turns, "MAX_WAITING", 1000)
    with ThreadPoolExecutor(2 * NUM_THREADS) as threads, server.connect() as client:
        asked = [
            threads.submit(client.get, "/v1/models/inspect", params={"path": path}) for _ in range(2 * NUM_THREADS)
        ]
        headers = {"Authorization": f"Bearer {other_key}"}
        try:
            for _ in range(10):
                answer = httpx2.get(f"{server.url}/v1/jobs", headers=headers, trust_env=False, timeout=20)
                assert answer.status_code == 200
        finally:
            over.set()
        assert {each.result().status_code for each in asked} == {422}


def test_a_stream_of_long_events_is_sent_in_pieces(
    server: Server, submit: Submit, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch ends where its text is long enough, however few events it has; nothing is left out or sent twice."""
    monkeypatch.setattr(job_stream, "MAX_TEXT", 3000)
    monkeypatch.setattr(job_stream, "PIECE", 700)
    sizes = list[int]()
    tell = job_stream.tell

    async def measured(*given: Any) -> AsyncIterator[str]:
        async for piece in tell(*given):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(job_stream, "tell", measured)
    job_id = submit()
    with sessions.begin() as session:
        job = session.get_one(Job, job_id)
        events.add(session, job, *(NewEvent("warning", {"message": "x" * 1000, "number": n}) for n in range(20)))
        control.cancel(session, job_id)
    with server.connect() as client:
        told = client.get(f"/v1/jobs/{job_id}/events/stream").text
    numbers = [json.loads(line[5:])["data"].get("number") for line in told.splitlines() if '"message"' in line]
    assert numbers == list(range(20)) and max(sizes) <= 700


def test_odd_text_in_an_event_arrives(
    client: TestClient, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    r"""NUL, a backslash before what looks like one, half a surrogate pair, infinity: Postgres takes none of them."""
    odd = r'{"kind": "warning", "code": "said", "message": "a\u0000b\\u0000c\ud800d", "number": 1e999}'
    job_id = post(client, make_model(raw=[odd]))
    start_worker()
    wait_for(job_id, "succeeded")
    events = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    [said] = [event["data"] for event in events if event["data"].get("code") == "said"]
    assert (said["message"], said["number"]) == ("a\ufffdb\\u0000c\ufffdd", None)


def test_an_event_that_cannot_be_read_fails_the_attempt(
    client: TestClient, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    job_id = post(client, make_model(raw=['{"kind": "warning", "message": "it breaks']))
    start_worker()
    job = wait_for(job_id, "failed")
    assert job.error is not None and job.error["code"] == "engine_event_lost"
    assert "warning" in job.error["message"]
