"""Chats over HTTP with a real worker and real models; and as rows, what ends them."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.http.security import READ, WRITE, create_key
from api.settings import Settings
from api.store import manifest
from api.store.engine import Sessions
from api.store.queue import chat_leases, chats, clock, jobs, leases
from api.store.queue.chat_leases import ChatLease, Limits
from api.store.queue.leases import LeaseLost, Order
from api.store.tables.chats import Chat, EndReason
from bitfoundry.client.service import Client
from quantcore.engine.pipeline.job import run
from tests.support.api import bearer
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.proofs import prove_here
from tests.support.service import Server, WorkerProcess, wait_for_empty
from tests.support.waiting import wait_until

NO_LIMITS = Limits(idle_s=1000, max_s=1000, job_waits_s=1000, memory_bytes=1 << 50)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(original, result): a tiny model and its artifact."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model(folder / "tiny", dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", prove_here)
        run(task(model, folder / "out", "w4a16"), lambda event: None)
    return model, folder / "out"


@pytest.fixture
def succeeded(sessions: Sessions, submit: Callable[..., str]) -> Callable[..., str]:
    """``succeeded(model, out)``: the id of a job whose artifact is in ``out``."""

    def succeed(model: Path | str = "/nowhere", out: Path | str = "/x", size_bytes: int = 1) -> str:
        job_id = submit(model)
        sha256 = manifest.read(Path(out)).sha256 if Path(out).is_dir() else "0" * 64
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
            assert lease and lease.job_id == job_id
            summary = {"size_before_bytes": size_bytes, "exports": {"quark": {"path": "."}}}
            leases.succeed(session, lease, manifest_sha256=sha256, path=str(out), num_bytes=1, summary=summary)
        return job_id

    return succeed


@pytest.fixture
def chat_settings(settings: Settings, quantized: tuple[Path, Path]) -> Settings:
    """Time for the real engine, and a model folder that holds the tiny model."""
    changes = {"lease_s": 30, "model_roots": (quantized[0].parent,), "confine_engine": True}
    return settings.model_copy(update=changes)


def begin(sessions: Sessions, job_id: str, wait_s: float = 60) -> str:
    with sessions.begin() as session:
        job = jobs.lock(session, job_id)
        assert job
        return chats.begin(session, job, max_new_tokens=8, wait_s=wait_s).id


def claim(sessions: Sessions, lease_s: float = 60, memory_bytes: int | None = None) -> ChatLease | None:
    with sessions.begin() as session:
        return chat_leases.claim(session, worker="w", lease_s=lease_s, memory_bytes=memory_bytes)


def must_claim(sessions: Sessions, lease_s: float = 60) -> ChatLease:
    lease = claim(sessions, lease_s)
    assert lease is not None
    return lease


def change(sessions: Sessions, change: Callable[..., Any], lease: ChatLease, **arguments: Any) -> Any:
    with sessions.begin() as session:
        return change(session, lease, **arguments)


def find(sessions: Sessions, chat_id: str) -> Chat:
    with sessions.begin() as session:
        chat = chats.find(session, chat_id)
        assert chat
        return chat


def reap(sessions: Sessions) -> int:
    with sessions.begin() as session:
        return chat_leases.reap(session)


def ask(sessions: Sessions, chat_id: str, prompt: str) -> int:
    with sessions.begin() as session:
        chat = chats.lock(session, chat_id)
        assert chat
        return chats.ask(session, chat, prompt, max_turns=2).number


# with a worker


def test_a_chat_from_its_opening_to_its_end(
    chat_settings: Settings, server: Server, sessions: Sessions, quantized: tuple[Path, Path],
    succeeded: Callable[..., str], start_worker: Callable[..., WorkerProcess],
) -> None:  # fmt: skip
    """Both models answer, the stream has the answers and the end, and nothing of the chat stays on the disk."""
    kept = shutil.copytree(quantized[1], chat_settings.artifacts_dir / "job" / "sha256")
    job_id = succeeded(quantized[0], kept)
    start_worker(chat_settings)
    with Client(server.url, server.key) as client:
        chat = client.chats.open(job_id, max_new_tokens=8)
        assert chat.state in ("waiting", "starting") and chat.turns == []
        turns = [client.chats.say(chat.id, prompt) for prompt in ("for example", "the object")]
        for turn in turns:
            assert turn.state == "answered" and turn.original and turn.quantized
            assert turn.original.num_tokens == 8 and turn.first_difference is not None
        found = client.chats.get(chat.id)
        assert found.state == "open" and found.turns == turns and found.has_template is False
        assert client.chats.of_job(job_id) == found
        client.chats.end(chat.id)
        seen = list(client.chats.stream(chat.id))
        assert [turn.prompt for turn in seen] == ["for example", "the object"]
        assert (client.chats.get(chat.id).state, client.chats.get(chat.id).reason) == ("ended", "closed")
    wait_for_empty(chat_settings.work_dir)


@pytest.mark.slow
def test_answers_are_streamed_while_they_grow(
    chat_settings: Settings, server: Server, quantized: tuple[Path, Path],
    succeeded: Callable[..., str], start_worker: Callable[..., WorkerProcess],
) -> None:  # fmt: skip
    """A stream that is open while a turn is asked and the chat is ended gets all of it, and then ends."""
    job_id = succeeded(*quantized)
    start_worker(chat_settings)
    with server.connect() as client:
        chat_id = client.post(f"/v1/jobs/{job_id}/chat", json={"max_new_tokens": 200}).json()["id"]
        states, num_tokens = [], []
        for kind, data in messages(client, f"/v1/chats/{chat_id}/stream"):
            if kind == "chat" and data["state"] == "open" and not states:
                states.append("asked")
                asked = client.post(f"/v1/chats/{chat_id}/turns", json={"prompt": "for example"})
                assert asked.status_code == 202
                refused = client.post(f"/v1/chats/{chat_id}/turns", json={"prompt": "more"})
                assert (refused.status_code, refused.json()["code"]) == (409, "turn_in_progress")
            if kind == "turn":
                states.append(data["state"])
                num_tokens.append((data["original"] or {}).get("num_tokens", 0))
                if data["state"] == "answered":
                    client.delete(f"/v1/chats/{chat_id}")
            last = (kind, data)
        assert last == ("end", {"state": "ended"})
        assert states[-1] == "answered" and num_tokens == sorted(num_tokens) and num_tokens[-1] == 200
        assert any(0 < num < 200 for num in num_tokens), "it was seen while it grew"


def messages(client: httpx2.Client, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    with client.stream("GET", path) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))


@pytest.mark.slow
def test_a_worker_that_stops_or_is_killed_ends_its_chat(
    chat_settings: Settings, client: TestClient, sessions: Sessions, quantized: tuple[Path, Path],
    succeeded: Callable[..., str], start_worker: Callable[..., WorkerProcess],
) -> None:  # fmt: skip
    job_id = succeeded(*quantized)
    settings = chat_settings.model_copy(update={"lease_s": 3})
    for stop, reason in ((WorkerProcess.drain, "worker_stopped"), (WorkerProcess.kill, "worker_lost")):
        worker = start_worker(settings)
        chat_id = client.post(f"/v1/jobs/{job_id}/chat").json()["id"]
        wait_until(lambda chat_id=chat_id: find(sessions, chat_id).state in ("starting", "open"))
        number = client.post(f"/v1/chats/{chat_id}/turns", json={"prompt": "x"}).json()["number"]
        stop(worker)
        wait_until(lambda chat_id=chat_id: find(sessions, chat_id).state == "ended")
        found = client.get(f"/v1/chats/{chat_id}").json()
        assert (found["reason"], found["turns"][number - 1]["error"]["code"]) == (reason, "chat_ended")
    start_worker(settings)  # it removes what the killed one left
    wait_for_empty(settings.work_dir)


def test_a_job_that_needs_the_worker_ends_the_chat(
    chat_settings: Settings, client: TestClient, sessions: Sessions, quantized: tuple[Path, Path],
    succeeded: Callable[..., str], submit: Callable[..., str], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Any],
) -> None:  # fmt: skip
    job_id = succeeded(*quantized)
    start_worker(chat_settings)
    chat_id = client.post(f"/v1/jobs/{job_id}/chat").json()["id"]
    wait_until(lambda: find(sessions, chat_id).state in ("starting", "open"))
    other = submit("/nowhere")
    wait_for(other, "failed")
    assert find(sessions, chat_id).reason == "worker_needed"


@pytest.mark.slow
def test_models_that_are_gone_end_the_chat_with_the_reason(
    chat_settings: Settings, client: TestClient, sessions: Sessions, quantized: tuple[Path, Path],
    succeeded: Callable[..., str], start_here: Callable[..., Any],
) -> None:  # fmt: skip
    gone = [
        (succeeded(chat_settings.model_roots[0] / "gone", quantized[1]), "model_not_found"),
        (succeeded("/etc", quantized[1]), "path_not_allowed"),
        (succeeded(quantized[0], "/nowhere"), "artifact_corrupt"),
    ]
    start_here(chat_settings)
    for job_id, code in gone:
        chat_id = client.post(f"/v1/jobs/{job_id}/chat").json()["id"]
        wait_until(lambda chat_id=chat_id: find(sessions, chat_id).state == "ended")
        found = find(sessions, chat_id)
        assert (found.reason, (found.error or {})["code"]) == ("failed", code)


# over HTTP


def test_what_a_chat_refuses(
    client: TestClient, settings: Settings, sessions: Sessions, submit: Callable[..., str],
    succeeded: Callable[..., str],
) -> None:  # fmt: skip
    waiting = client.post(f"/v1/jobs/{submit()}/chat")
    assert (waiting.status_code, waiting.json()["code"]) == (409, "not_ready")
    with sessions.begin() as session:
        session.execute(text("DELETE FROM job"))
    job_id = succeeded()
    assert client.get(f"/v1/jobs/{job_id}/chat").json()["code"] == "chat_not_found"
    too_many = client.post(f"/v1/jobs/{job_id}/chat", json={"max_new_tokens": settings.chat_max_new_tokens + 1})
    assert (too_many.status_code, too_many.json()["code"]) == (422, "too_many_tokens")
    chat_id = client.post(f"/v1/jobs/{job_id}/chat").json()["id"]
    [entry] = client.get("/v1/audit", params={"action": "chat.open"}).json()["data"]
    assert (entry["object_id"], entry["detail"]) == (chat_id, {"job_id": job_id})
    second = client.post(f"/v1/jobs/{succeeded()}/chat").json()
    assert second["code"] == "chat_in_progress" and chat_id in second["hint"]
    for body in ({"prompt": ""}, {"prompt": " \n"}, {"prompt": "x" * 8001}, {}):
        assert client.post(f"/v1/chats/{chat_id}/turns", json=body).status_code == 422
    for _ in range(2):  # to end twice does no harm
        assert client.delete(f"/v1/chats/{chat_id}").status_code == 204
    ended = client.post(f"/v1/chats/{chat_id}/turns", json={"prompt": "x"})
    assert (ended.status_code, ended.json()["code"]) == (409, "chat_ended")
    seq = client.get(f"/v1/chats/{chat_id}").json()["seq"]
    assert client.get(f"/v1/chats/{chat_id}/stream", params={"after": seq}).status_code == 204


def test_chats_have_a_scope_and_a_project(
    client: TestClient, sessions: Sessions, succeeded: Callable[..., str]
) -> None:
    job_id = succeeded()
    without = bearer(create_key(sessions, "k", scopes=[READ, WRITE]))
    refused = client.post(f"/v1/jobs/{job_id}/chat", headers=without)
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (403, ["jobs:chat"])
    chat_id = client.post(f"/v1/jobs/{job_id}/chat").json()["id"]
    project = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    foreign = bearer(create_key(sessions, "k", project_id=project))
    for method, path in (
        ("POST", f"/v1/jobs/{job_id}/chat"), ("GET", f"/v1/jobs/{job_id}/chat"), ("GET", f"/v1/chats/{chat_id}"),
        ("GET", f"/v1/chats/{chat_id}/stream"), ("DELETE", f"/v1/chats/{chat_id}"),
    ):  # fmt: skip
        assert client.request(method, path, headers=foreign).status_code == 404
    assert client.post(f"/v1/chats/{chat_id}/turns", json={"prompt": "x"}, headers=foreign).status_code == 404
    assert find(sessions, chat_id).state == "waiting"


# as rows


def test_turns_go_one_by_one_and_have_a_limit(sessions: Sessions, succeeded: Callable[..., str]) -> None:
    chat_id = begin(sessions, succeeded())
    ask(sessions, chat_id, "one")
    lease = must_claim(sessions)
    assert claim(sessions) is None
    change(sessions, chat_leases.start, lease, has_template=True)
    with pytest.raises(chats.CannotChat, match="not been answered yet"):
        ask(sessions, chat_id, "two")
    for _ in range(2):  # a worker that did not hear of its commit asks again
        asked = change(sessions, chat_leases.take_prompt, lease, after=0)
        assert (asked.number, asked.prompt) == (1, "one")
    assert change(sessions, chat_leases.take_prompt, lease, after=1) is None
    before = find(sessions, chat_id).seq
    change(sessions, chat_leases.record, lease, number=1, answer={"a": 1}, is_whole=True)
    change(sessions, chat_leases.record, lease, number=1, answer={"a": 2}, is_whole=True)  # too late
    with sessions.begin() as session:
        [turn] = chats.read_turns(session, chat_id, after=before)
        assert (turn.state, turn.answer, turn.seq) == ("answered", {"a": 1}, before + 1)
        assert chats.read_turns(session, chat_id, after=before + 1) == []
    ask(sessions, chat_id, "two")
    change(sessions, chat_leases.take_prompt, lease, after=1)
    change(sessions, chat_leases.fail_turn, lease, number=2, error={"code": "x", "message": "y"})
    with pytest.raises(chats.CannotChat, match="2 turns"):
        ask(sessions, chat_id, "three")


def test_a_chat_ends_when_nobody_takes_it_or_its_worker_is_lost(
    sessions: Sessions, succeeded: Callable[..., str]
) -> None:
    late, held = begin(sessions, succeeded(), wait_s=-1), ""
    assert reap(sessions) == 1 and find(sessions, late).reason == "no_worker"
    held = begin(sessions, succeeded())
    lease = must_claim(sessions, lease_s=-1)
    with pytest.raises(LeaseLost):
        change(sessions, chat_leases.renew, lease, lease_s=60, limits=NO_LIMITS)
    assert reap(sessions) == 1 and find(sessions, held).reason == "worker_lost"
    with pytest.raises(LeaseLost):
        change(sessions, chat_leases.finish, lease, reason=EndReason.IDLE)
    with sessions.begin() as session:
        session.execute(text("UPDATE chat SET ended_at = ended_at - interval '25 h' WHERE id = :id"), {"id": late})
    reap(sessions)
    with sessions.begin() as session:
        assert chats.find(session, late) is None and chats.find(session, held) is not None


def test_the_lease_of_a_clock_that_was_set_back_ends_in_time(sessions: Sessions, succeeded: Callable[..., str]) -> None:
    begin(sessions, succeeded())
    must_claim(sessions, lease_s=3600)
    for expected in (1, 0):
        with sessions.begin() as session:
            assert clock.shorten_leases(session, lease_s=60) == expected


def test_the_limits_of_a_chat(sessions: Sessions, succeeded: Callable[..., str], submit: Callable[..., str]) -> None:
    chat_id = begin(sessions, succeeded())
    lease = must_claim(sessions)

    def order(**changes: Any) -> Order | None:
        limits = Limits(**{name: getattr(NO_LIMITS, name) for name in Limits.__dataclass_fields__} | changes)
        return change(sessions, chat_leases.renew, lease, lease_s=60, limits=limits)

    assert order(idle_s=-1) is None, "it is not idle while it starts"
    change(sessions, chat_leases.start, lease, has_template=True)
    assert order() is None
    assert order(idle_s=-1) == Order.IDLE and order(max_s=-1) == Order.TIME_IS_UP
    ask(sessions, chat_id, "x")
    assert order(idle_s=-1) is None, "it is not idle while it answers"
    submit(needs_memory_bytes=1000)
    assert order(job_waits_s=-1, memory_bytes=999) is None and order(job_waits_s=60) is None
    assert order(job_waits_s=-1) == Order.WORKER_NEEDED
    with sessions.begin() as session:
        session.execute(text("UPDATE project SET max_running = 0"))
    assert order(job_waits_s=-1) is None, "a job that its project's quota holds back needs no worker"


def test_a_chat_waits_for_a_worker_with_memory_for_both_models(
    sessions: Sessions, succeeded: Callable[..., str]
) -> None:
    begin(sessions, succeeded(size_bytes=1000))
    needed = 2000 + chats.EXTRA_MEMORY_BYTES
    assert claim(sessions, memory_bytes=needed - 1) is None and claim(sessions, memory_bytes=needed) is not None


def test_a_job_takes_its_chats_along(sessions: Sessions, succeeded: Callable[..., str]) -> None:
    job_id = succeeded()
    chat_id = begin(sessions, job_id)
    ask(sessions, chat_id, "x")
    lease = must_claim(sessions)
    with sessions.begin() as session:
        job = jobs.lock(session, job_id)
        assert job
        jobs.delete(session, job)
    with pytest.raises(LeaseLost):
        change(sessions, chat_leases.check, lease)
