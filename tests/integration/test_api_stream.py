"""Server-sent events from a real server: nothing missed, nothing twice, and an end."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.http import event_stream
from api.http.security import SIGN_IN_COOKIE, create_key
from api.jobs import stream
from api.store.engine import Sessions
from api.store.queue import control, jobs, leases
from api.store.queue.events import NewEvent
from api.store.queue.leases import Lease
from bitfoundry.client.service import Client
from tests.support.attempts import write
from tests.support.service import Server
from tests.support.waiting import PATIENCE_S, wait_until

Submit = Callable[..., str]


def start(sessions: Sessions, submit: Submit) -> tuple[str, Lease]:
    job_id = submit()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
    assert lease
    return job_id, lease


def record(sessions: Sessions, lease: Lease, *kinds: str) -> None:
    with sessions.begin() as session:
        news = [NewEvent(kind, {"text": "a\nb"}) for kind in kinds]
        leases.record(session, lease, happened=news, columns={})


def end(sessions: Sessions, lease: Lease) -> None:
    with sessions.begin() as session:
        leases.succeed(session, lease, manifest_sha256="s", path="/p", num_bytes=1, summary={})


def read_stream(answer: httpx2.Response) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
    """(id, event, data) of every message, read as the WHATWG says."""
    message: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            field, _, value = line.partition(": ")
            message[field] = value
        elif message:
            if "data" in message:
                number = int(message["id"]) if "id" in message else None
                yield number, message["event"], json.loads(message["data"])
            message = {}


@pytest.mark.slow
def test_what_was_then_what_comes_then_the_end(server: Server, sessions: Sessions, submit: Submit) -> None:
    job_id, lease = start(sessions, submit)
    seen: list[tuple[int | None, str]] = []
    with server.connect() as client, client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        messages = read_stream(answer)
        seen += [next(messages)[:2] for _ in range(2)]
        assert seen == [(1, "state_changed"), (2, "state_changed")]
        for number in range(3, 6):
            sent_at = time.monotonic()
            record(sessions, lease, "a kind: of\nits own")
            identity, kind, data = next(messages)
            assert time.monotonic() - sent_at < 10
            assert (identity, kind) == (number, "a_kind__of_its_own")
            assert (data["seq"], data["data"]) == (number, {"text": "a\nb"})
        end(sessions, lease)
        assert [message[:2] for message in messages] == [(6, "state_changed"), (None, "end")]


@pytest.mark.parametrize("how", ["header", "query"])
def test_a_stream_goes_on_after_the_last_event_seen(
    how: str, client: TestClient, sessions: Sessions, submit: Submit
) -> None:
    job_id, lease = start(sessions, submit)
    record(sessions, lease, *"abc")
    end(sessions, lease)
    url = f"/v1/jobs/{job_id}/events/stream"

    def ask(after: int) -> httpx2.Response:
        if how == "query":
            return client.get(f"{url}?after={after}")
        return client.get(f"{url}?after=999", headers={"Last-Event-ID": str(after)})  # the header is newer

    assert [message[0] for message in read_stream(ask(3))] == [4, 5, 6, None]
    assert [message[0] for message in read_stream(ask(5))] == [6, None]
    for after in (6, 7):
        answer = ask(after)
        assert (answer.status_code, answer.content) == (204, b"")


def test_a_story_of_many_pages_is_told_whole(
    client: TestClient, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BATCH", 3)
    job_id, lease = start(sessions, submit)
    record(sessions, lease, *"abcdefgh")
    end(sessions, lease)
    messages = read_stream(client.get(f"/v1/jobs/{job_id}/events/stream"))
    assert [message[0] for message in messages] == [*range(1, 12), None]


def test_nothing_is_missed_however_fast_it_comes(server: Server, sessions: Sessions, submit: Submit) -> None:
    job_id, lease = start(sessions, submit)

    def write() -> None:
        for _ in range(60):
            record(sessions, lease, "x", "y")
        end(sessions, lease)

    writer = threading.Thread(target=write)
    with server.connect() as client:
        writer.start()
        heard: list[list[int | None]] = []
        for _ in range(2):  # the second comes late
            with client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
                heard.append([message[0] for message in read_stream(answer)])
        writer.join()
    assert heard == [[*range(1, 124), None]] * 2


@pytest.mark.slow
def test_many_streams_share_one_question_a_tick(
    server: Server, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = event_stream.events.find_heads
    monkeypatch.setattr(
        event_stream.events, "find_heads", lambda session, ids: asked.append(len(ids)) or original(session, ids)
    )
    leased = [start(sessions, submit) for _ in range(20)]
    heard: dict[str, list[str]] = {}

    def listen(job_id: str) -> None:
        with server.connect() as client, client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
            heard[job_id] = [kind for _, kind, _ in read_stream(answer)]

    threads = [threading.Thread(target=listen, args=[job_id]) for job_id, _ in leased]
    for thread in threads:
        thread.start()
    wait_until(lambda: asked and max(asked) >= 20)
    asked.clear()
    began = time.monotonic()
    wait_until(lambda: len(asked) >= 3)
    assert len(asked) <= 3 * (time.monotonic() - began) + 2  # once a tick for all of them, and not for each
    for _, lease in leased:
        end(sessions, lease)
    for thread in threads:
        thread.join(10)
    assert heard == {job_id: ["state_changed"] * 3 + ["end"] for job_id, _ in leased}


@pytest.mark.slow
def test_streams_of_one_job_share_what_they_read(
    server: Server, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = stream.events.read
    monkeypatch.setattr(
        stream.events, "read", lambda session, **how: read.append(how["after"]) or original(session, **how)
    )
    job_id, lease = start(sessions, submit)
    heard: list[list[int | None]] = []
    arrived = threading.Semaphore(0)

    def listen() -> None:
        with server.connect() as client, client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
            messages = read_stream(answer)
            first = [next(messages)[0], next(messages)[0]]
            arrived.release()
            heard.append(first + [message[0] for message in messages])

    threads = [threading.Thread(target=listen) for _ in range(30)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert arrived.acquire(timeout=PATIENCE_S)
    read.clear()
    for _ in range(4):
        record(sessions, lease, "x")
        time.sleep(0.7)
    end(sessions, lease)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert heard == [[*range(1, 8), None]] * 30
    assert len(read) < 30  # each for itself they would read 150 times


def test_a_quiet_stream_is_kept_alive(
    server: Server, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PING_S", 0.2)
    job_id = submit()
    with server.connect() as client, client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 3000"
        assert next(line for line in lines if line.startswith(":")) == ": nothing new"
        with sessions.begin() as session:
            control.cancel(session, job_id)
        assert "event: end" in list(lines)


def test_a_deleted_job_ends_its_streams(server: Server, sessions: Sessions, submit: Submit) -> None:
    job_id = submit()
    with server.connect() as client, client.stream("GET", f"/v1/jobs/{job_id}/events/stream") as answer:
        messages = read_stream(answer)
        assert next(messages)[0] == 1
        with sessions.begin() as session:
            session.execute(text("DELETE FROM job"))
            assert jobs.find(session, job_id) is None
        assert list(messages) == [(None, "end", {"state": "deleted"})]


def test_errors_come_before_the_stream(client: TestClient, submit: Submit) -> None:
    job_id = submit()
    for garbage in ("x", "-1", "1.5", "", "9" * 30, "٣"):
        answer = client.get(f"/v1/jobs/{job_id}/events/stream", headers={"Last-Event-ID": garbage.encode()})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_last_event_id"), garbage
    assert client.get(f"/v1/jobs/job_{'0' * 32}/events/stream").json()["code"] == "job_not_found"
    other = {"Authorization": "Bearer nonsense"}
    assert client.get(f"/v1/jobs/{job_id}/events/stream", headers=other).status_code == 401


def test_events_of_one_kind(client: TestClient, sessions: Sessions, submit: Submit) -> None:
    job_id, lease = start(sessions, submit)
    record(sessions, lease, "layer_quantized", "warning", "layer_quantized", "progress")
    found = client.get(f"/v1/jobs/{job_id}/events", params={"kind": ["layer_quantized"], "limit": 1}).json()
    assert ([event["seq"] for event in found["data"]], found["has_more"]) == ([3], True)
    found = client.get(f"/v1/jobs/{job_id}/events", params={"kind": ["layer_quantized", "progress"], "after": 3}).json()
    assert ([event["seq"] for event in found["data"]], found["has_more"]) == ([5, 6], False)


def test_the_log_as_it_comes(server: Server, sessions: Sessions, submit: Submit) -> None:
    job_id, lease = start(sessions, submit)
    with Client(server.url, server.key) as client:
        write(sessions, lease, "debug: a", "info: b")
        followed = client.stream_logs(job_id, level="info")
        assert next(followed).text == "b"
        for text_ in ("c", "d"):
            write(sessions, lease, f"warning: {text_}")
            assert next(followed).text == text_
        write(sessions, lease, "debug: e", "error: f")
        end(sessions, lease)
        assert [(line.seq, line.text) for line in followed] == [(6, "f")]
        assert [line.text for line in client.stream_logs(job_id, after=4)] == ["e", "f"]
        assert list(client.stream_logs(job_id, after=6)) == []
    with server.connect() as session:
        url = f"/v1/jobs/{job_id}/logs/stream"
        assert session.get(url, headers={"Last-Event-ID": "x"}).json()["code"] == "invalid_last_event_id"
        assert session.get(f"/v1/jobs/job_{'0' * 32}/logs/stream").json()["code"] == "job_not_found"
        assert session.get(f"{url}?level=loud").status_code == 422


def sign_in(server: Server, key: str) -> dict[str, str]:
    answer = httpx2.post(f"{server.url}/v1/sign-in", json={"api_key": key}, trust_env=False)
    cookie = f"{SIGN_IN_COOKIE}={answer.cookies[SIGN_IN_COOKIE]}"
    return {"Cookie": cookie, "X-CSRF-Token": answer.json()["csrf_token"]}


UPDATE_KEY = "UPDATE api_key SET {} WHERE name = :name"
NOW = "clock_timestamp()"
ENDS = {  # name of the key -> what ends its streams
    "revoked": UPDATE_KEY.format(f"revoked_at = {NOW}"),
    "expired": UPDATE_KEY.format(f"expires_at = {NOW}"),
    "rotated": UPDATE_KEY.format(f"previous_until = {NOW}"),
    "scope lost": UPDATE_KEY.format("scopes = ARRAY['jobs:write']"),
    "cookie: key revoked": UPDATE_KEY.format(f"revoked_at = {NOW}"),
    "cookie: signed out": "",
    "cookie: over": f"UPDATE sign_in SET expires_at = {NOW} FROM api_key "
    "WHERE api_key.id = sign_in.api_key_id AND api_key.name = :name",
}


@pytest.mark.slow
def test_streams_end_with_what_opened_them(server: Server, sessions: Sessions, submit: Submit) -> None:
    """Of events and of the log, within five seconds; those of other keys go on."""
    job_id, lease = start(sessions, submit)
    opened = threading.Semaphore(0)
    ended: dict[tuple[str, str], float] = {}
    statuses: set[int] = set()

    def listen(name: str, kind: str, headers: dict[str, str]) -> None:
        url = f"{server.url}/v1/jobs/{job_id}/{kind}/stream"
        with httpx2.Client(headers=headers, trust_env=False, timeout=PATIENCE_S) as client:
            with client.stream("GET", url) as answer:
                lines = answer.iter_lines()
                assert next(lines) == "retry: 3000"
                opened.release()
                said = list(lines)
            ended[name, kind] = time.monotonic()
            if name == "stays":
                assert "event: end" in said
            else:
                assert "event: end" not in said
                statuses.add(client.get(url).status_code)

    keys = {name: create_key(sessions, name) for name in (*ENDS, "stays")}
    with sessions.begin() as session:  # the secret that was shown is the old one of the two, which is still valid
        values = f"previous_sha256 = secret_sha256, secret_sha256 = '\\x00', previous_until = {NOW} + interval '1 day'"
        session.execute(text(UPDATE_KEY.format(values)), {"name": "rotated"})
    headers = {
        name: sign_in(server, key) if name.startswith("cookie") else {"Authorization": f"Bearer {key}"}
        for name, key in keys.items()
    }
    streams = [(name, kind) for name in keys for kind in ("events", "logs")]
    threads = [threading.Thread(target=listen, args=[name, kind, headers[name]]) for name, kind in streams]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert opened.acquire(timeout=PATIENCE_S)
    httpx2.delete(f"{server.url}/v1/sign-in", headers=headers["cookie: signed out"], trust_env=False)
    with sessions.begin() as session:
        for name, statement in ENDS.items():
            if statement:
                session.execute(text(statement), {"name": name})
    over_at = time.monotonic()
    for thread in threads[:-2]:
        thread.join(10)
    assert len(ended) == len(threads) - 2, ended.keys()
    assert max(ended.values()) - over_at < 5
    assert statuses == {401, 403}
    end(sessions, lease)
    for thread in threads[-2:]:
        thread.join(PATIENCE_S)
    assert len(ended) == len(threads)


@pytest.mark.slow
def test_many_streams_of_many_keys_are_checked_together(
    server: Server, sessions: Sessions, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = event_stream.signins.find_open
    monkeypatch.setattr(
        event_stream.signins, "find_open", lambda *given: asked.append(len(given[1])) or original(*given)
    )
    job_id, lease = start(sessions, submit)
    keys = [create_key(sessions, f"key {number}") for number in range(10)]

    def listen(key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{server.url}/v1/jobs/{job_id}/events/stream"
        with httpx2.stream("GET", url, headers=headers, trust_env=False, timeout=PATIENCE_S) as answer:
            list(answer.iter_lines())

    threads = [threading.Thread(target=listen, args=[key]) for key in keys * 2]
    for thread in threads:
        thread.start()
    wait_until(lambda: asked and max(asked) >= 10)
    asked.clear()
    time.sleep(2 * event_stream.CHECK_S)
    assert 1 <= len(asked) <= 3
    end(sessions, lease)
    for thread in threads:
        thread.join(PATIENCE_S)
