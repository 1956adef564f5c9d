"""Faults of the broker. PostgreSQL is the truth: whatever becomes of messages, jobs run once and are all done."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import redis
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import func, select

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import workers
from api.store.queue.outbox import WAKE
from api.store.queue.wakeups import QUEUE, make_celery, sender
from api.store.tables.jobs import Attempt, Job, Outbox
from bitfoundry.local.stack import Valkey
from tests.support.api import post
from tests.support.attempts import outcomes
from tests.support.faults import ApiProcess
from tests.support.service import WorkerProcess
from tests.support.waiting import wait_until

MakeModel = Callable[..., Path]
Submit = Callable[..., str]
GetJob = Callable[[str], Job]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A broker that may be killed."""
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as home:
        server = Valkey(Path(home))
        server.start()
        yield server
        server.stop()


def on(valkey: Valkey, settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"broker_url": SecretStr(valkey.url), **changes})


def session_of(url: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=url.removeprefix("redis+socket://"))


def num_messages(sessions: Sessions) -> int:
    with sessions.begin() as session:
        return session.scalar(select(func.count()).select_from(Outbox)) or 0


@pytest.mark.slow
def test_fifty_jobs_survive_a_flush(
    settings: Settings, valkey: Valkey, sessions: Sessions, make_model: MakeModel, submit: Submit,
    start_worker: StartWorker, wait_for: WaitFor,
) -> None:  # fmt: skip
    model = make_model()
    ids = [submit(model) for _ in range(50)]
    start_worker(on(valkey, settings))
    wait_for(ids[5], "succeeded")
    valkey.flush()
    for job_id in ids:
        wait_for(job_id, "succeeded")
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(Attempt)) == 50


@pytest.mark.slow
def test_a_broker_that_dies_and_comes_back(
    settings: Settings, valkey: Valkey, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker,
    wait_for: WaitFor,
) -> None:  # fmt: skip
    """Dead: jobs are taken and done by polling, and /healthz/ready says degraded. Back, and empty: messages flow."""
    model, own = make_model(), on(valkey, settings)
    worker = start_worker(own)
    key = create_key(sessions, "k")
    with TestClient(create_app(own), headers={"Authorization": f"Bearer {key}"}) as client:
        wait_for(post(client, model), "succeeded")
        assert valkey._process is not None
        valkey._process.kill()
        ids = [post(client, model) for _ in range(5)]
        ready = client.get("/healthz/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["broker"]) == (200, "degraded", "unreachable")
        for job_id in ids:
            wait_for(job_id, "succeeded")
        assert num_messages(sessions) > 0
        valkey.stop()
        valkey.start()
        wait_until(lambda: num_messages(sessions) == 0)
        with session_of(valkey.url) as broker:  # the worker listens again, and takes them
            wait_until(lambda: broker.llen(QUEUE) == 0 and len(broker.client_list()) > 1)
        assert client.get("/healthz/ready").json()["status"] == "ok"
        wait_for(post(client, model), "succeeded")
    assert worker.process.poll() is None


@pytest.mark.slow
def test_a_message_ten_times_is_one_attempt(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker,
    wait_for: WaitFor, get_job: GetJob, broker_url: str,
) -> None:  # fmt: skip
    start_worker()
    job_id = submit(make_model(mode="steady"))
    app = make_celery(broker_url)
    for _ in range(10):
        sender(app)(WAKE, {"v": 1})
    app.close()
    wait_for(job_id, "running")
    with session_of(broker_url) as broker:
        # Early ack: a running job has no message that a broker could deliver again when it thinks it has waited enough.
        wait_until(lambda: broker.llen(QUEUE) == broker.hlen("unacked") == 0)
    assert get_job(job_id).state == "running"
    wait_for(job_id, "succeeded")
    assert outcomes(sessions, job_id) == ["succeeded"]


@pytest.mark.slow
def test_an_api_that_dies_before_the_message_is_sent(
    settings: Settings, sessions: Sessions, make_model: MakeModel, start_worker: StartWorker, wait_for: WaitFor,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The row is there, the message is not: another process's relay sends it, and wakes a worker that hardly polls."""
    key = create_key(sessions, "k")
    cut_off = settings.model_copy(update={"broker_url": SecretStr("redis+socket:///nowhere/valkey.sock")})
    start_worker(settings.model_copy(update={"poll_s": 60, "lease_s": 300}))
    wait_for_worker(sessions)
    with ApiProcess(cut_off, tmp_path / "first.log") as first:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=first.url, headers=headers, trust_env=False) as client:
            job_id = post(client, make_model())  # type: ignore[arg-type]
        first.kill()
        assert num_messages(sessions) == 1
        with TestClient(create_app(settings)):
            wait_for(job_id, "succeeded", timeout_s=30)
    assert num_messages(sessions) == 0


def wait_for_worker(sessions: Sessions) -> None:
    def is_there() -> bool:
        with sessions.begin() as session:
            return bool(workers.find_live(session))

    wait_until(is_there)
    time.sleep(1)  # it looked for jobs when it started: from now on only a message brings it to
