"""What a stranger can do to the front door: nothing that others would notice."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api import main
from api.http import connection_limits
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import control
from tests.support.api import DOORS, PLACES, walk
from tests.support.service import Server
from tests.support.waiting import PATIENCE_S

SIGN_IN = "POST /v1/sign-in HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextmanager
def dialled(server: Server, said: str = "") -> Iterator[socket.socket]:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as line:
        line.sendall(said.encode())
        yield line


def hear(line: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    heard = b""
    with suppress(ConnectionError):
        while data := line.recv(65536):
            heard += data
    return heard


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def seconds_of_health(client: httpx2.Client) -> float:
    began = time.monotonic()
    assert client.get("/healthz/live").status_code == 200
    return time.monotonic() - began


def test_a_body_in_crumbs_is_refused_at_once(server: Server) -> None:
    """A million chunks of one byte, without any key: today's parser would be busy with them for seconds."""
    with server.connect() as client:
        usual_s = max(seconds_of_health(client) for _ in range(20))
    with dialled(server, SIGN_IN + "Transfer-Encoding: chunked\r\n\r\n") as line:
        crumbs = b"1\r\nx\r\n" * 20_000

        def pour() -> None:
            with suppress(OSError):
                for _ in range(50):
                    line.sendall(crumbs)

        pouring = threading.Thread(target=pour)
        pouring.start()
        slowest_s = 0.0
        with server.connect() as client:
            while pouring.is_alive():
                slowest_s = max(slowest_s, seconds_of_health(client))
        answer = hear(line)
        pouring.join()
    head, _, said = answer.partition(b"\r\n\r\n")
    assert status_of(head) == 400
    assert json.loads(said)["code"] == "chunks_too_small"
    assert slowest_s < 1 + 20 * usual_s


def test_a_body_in_small_chunks_is_taken(server: Server) -> None:
    rows = b"".join(b'{"text": "row %d of some that are long enough to be read"}\n' % number for number in range(3000))
    digest = hashlib.sha256(rows).hexdigest()

    def lines() -> Iterator[bytes]:
        for start in range(0, len(rows), 600):
            yield rows[start : start + 600]

    with server.connect() as client:
        upload = client.post("/v1/uploads", json={"filename": "rows.jsonl"}).json()["id"]
        sent = client.put(f"/v1/uploads/{upload}/parts/1", params={"sha256": digest}, content=lines())
        assert sent.status_code == 200, sent.text


def test_the_key_is_asked_for_before_the_body(server: Server, settings: Settings) -> None:
    """Of every route that takes one: the answer is there although no byte of the body ever comes."""
    taking = [(method, path) for method, path in walk(create_app(settings)) if method in ("POST", "PUT", "PATCH")]
    assert len(taking) >= 20
    for method, path in taking:
        if (method, path) in DOORS:
            continue
        head = f"{method} {path.format(**PLACES)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with dialled(server, head + "Authorization: Bearer nonsense\r\nContent-Length: 100\r\n\r\n") as line:
            line.settimeout(10)
            answer = line.recv(65536)
            assert status_of(answer) == 401, (method, path)
            assert b"\r\nconnection: close\r\n" in answer.lower(), (method, path)


def test_what_comes_after_the_answer_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "LINGER_S", 1.0)
    head = "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with dialled(server, head) as line:
        assert status_of(line.recv(65536)) == 401
        with pytest.raises(OSError):
            while True:
                line.sendall(b"1\r\nx\r\n" * 10_000)


def test_a_large_body_without_a_key_gets_its_answer(server: Server) -> None:
    with server.connect() as client:
        answer = client.put(
            f"/v1/uploads/{PLACES['upload_id']}/parts/1",
            params={"sha256": "0" * 64},
            content=bytes(16 << 20),
            headers={"Authorization": "Bearer nonsense"},
        )
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


def test_a_sign_in_has_a_small_body(server: Server) -> None:
    with server.connect() as client:
        answer = client.post("/v1/sign-in", json={"api_key": "x" * 5000})
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "said",
    [
        "",
        "GET /v1/jobs HT",
        "GET /healthz/live HTTP/1.1\r\nHost: x\r\n\r\nGET /",
        SIGN_IN + "Content-Length: 9\r\n\r\n{",
    ],
)
def test_whoever_says_nothing_more_is_hung_up_on(said: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.5)
    monkeypatch.setattr(connection_limits, "BODY_S", 0.5)
    monkeypatch.setattr(connection_limits, "LINGER_S", 0.5)
    with dialled(server, said) as line:
        line.settimeout(PATIENCE_S)
        last = hear(line).split(b"HTTP/1.1 ")[-1]
    assert last.startswith(b"408 ")
    assert json.loads(last.partition(b"\r\n\r\n")[2])["code"] == "request_timeout"


@pytest.mark.slow
def test_drop_by_drop_is_too_slow(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no reason to wait for ever, neither for a head nor for a body."""
    monkeypatch.setattr(connection_limits, "HEAD_S", 1.0)
    monkeypatch.setattr(connection_limits, "BODY_S", 1.0)
    monkeypatch.setattr(connection_limits, "LINGER_S", 0.2)
    for said in ("GET /v1/jobs HTTP/1.1\r\nX: ", SIGN_IN + 'Content-Length: 1000\r\n\r\n{"api_key": "'):
        with dialled(server, said) as line:
            deadline = time.monotonic() + PATIENCE_S
            with suppress(ConnectionError):
                while time.monotonic() < deadline:
                    line.sendall(b"x")
                    time.sleep(0.1)
            assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_steady_body_may_take_its_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "BODY_S", 0.5)
    monkeypatch.setattr(connection_limits, "MIN_BODY_BYTES_PER_S", 1000)
    rows = b'{"text": "one of many rows"}\n' * 500

    def slowly() -> Iterator[bytes]:
        for start in range(0, len(rows), 2000):
            yield rows[start : start + 2000]
            time.sleep(0.3)

    with server.connect() as client:
        upload = client.post("/v1/uploads", json={"filename": "rows.jsonl"}).json()["id"]
        digest = hashlib.sha256(rows).hexdigest()
        sent = client.put(f"/v1/uploads/{upload}/parts/1", params={"sha256": digest}, content=slowly())
        assert sent.status_code == 200, sent.text


def test_silent_connections_keep_nobody_out(
    server: Server, sessions: Sessions, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have said nothing for the longest time go first; streams and whoever has shown a key stay."""
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 20)
    job_id = submit()
    silent: list[socket.socket] = []
    with (
        ExitStack() as lines,
        server.connect() as client,
        client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as stream,
    ):
        heard = stream.iter_lines()
        assert next(heard).startswith("retry")
        place = urlsplit(server.url)
        for number in range(60):
            line = socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)
            silent.append(lines.enter_context(line))
            if number % 2:
                silent[-1].sendall((SIGN_IN + "Content-Length: 9\r\n\r\n{").encode())
            if number % 10 == 9:
                assert httpx2.get(f"{server.url}/healthz/live", trust_env=False, timeout=20).status_code == 200
        assert hear(silent[0]) == b""
        with sessions.begin() as session:
            control.cancel(session, job_id)
        assert "event: end" in list(heard)


def test_health_waits_for_nobody(settings: Settings, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are busy, and stay so."""
    monkeypatch.setattr(main, "NUM_THREADS", 1)
    app: FastAPI = create_app(settings)
    busy, over = threading.Event(), threading.Event()

    @app.get("/block")
    def block() -> None:
        busy.set()
        over.wait(PATIENCE_S)

    with TestClient(app) as client:
        blocking = threading.Thread(target=client.get, args=["/block"])
        blocking.start()
        try:
            assert busy.wait(PATIENCE_S)
            assert client.get("/healthz/live").status_code == 200
            assert client.get("/healthz/ready").json()["status"] == "ok"
        finally:
            assert not over.is_set()
            over.set()
            blocking.join()
