"""Faults of the database: nothing accepted is lost, nothing succeeds twice, and clients hear 503, never 500."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import func, select, text

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store import migrate
from api.store.engine import Sessions, connect, dispose
from api.store.queue import jobs, leases
from api.store.tables.jobs import Attempt, Job
from bitfoundry.local.stack import Postgres
from quantcore.config.time_limits import DATABASE_SILENT_S
from tests.support.attempts import outcomes
from tests.support.faults import ApiProcess, Line
from tests.support.service import ROOT, Server, WorkerProcess, job_columns
from tests.support.waiting import wait_until
from worker.lease import HeldLease

MakeModel = Callable[..., Path]
Submit = Callable[..., str]
StartWorker = Callable[..., WorkerProcess]
WaitFor = Callable[..., Job]
ENDS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill -9": signal.SIGKILL}


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Postgres]:
    """A durable server that may be killed."""
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as home:
        server = Postgres(Path(home))
        server.start()
        migrate.upgrade(server.url)
        yield server
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_server_that_ends_and_comes_back(
    how: str, own_postgres: Postgres, settings: Settings, make_model: MakeModel, start_worker: StartWorker,
    tmp_path: Path,
) -> None:  # fmt: skip
    """In the middle of submits, heartbeats and finishes, each of which may or may not have been committed."""
    own = settings.model_copy(update={"database_url": SecretStr(own_postgres.url), "lease_s": 20, "heartbeat_s": 2})
    key = create_key(own_postgres.url, how)
    accepted: dict[str, str] = {}
    refused: list[int] = []
    is_over = threading.Event()
    models = [make_model("steady", mode="steady"), make_model("quick")]

    def submit_on(number: int, api: ApiProcess) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=api.url, headers=headers, trust_env=False, timeout=60) as client:
            body = {"model": {"path": str(models[number > 0])}, "config": {"preset": "fp8"}}
            while not is_over.is_set():
                name = f"{how} {number} {time.monotonic_ns()}"
                while True:  # as the client's library does: the same key until there is an answer
                    answer = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": name})
                    if answer.status_code == 202:
                        break
                    refused.append(answer.status_code)
                    assert answer.headers.get("Retry-After"), answer.text
                    time.sleep(0.2)
                accepted[name] = answer.json()["id"]
                time.sleep(1 if number else 5)

    start_worker(own)
    with ApiProcess(own, tmp_path / "api.log") as api, ThreadPoolExecutor(3) as threads:
        working = [threads.submit(submit_on, number, api) for number in range(3)]
        time.sleep(4)
        process = own_postgres._process
        assert process is not None
        process.send_signal(ENDS[how])
        process.wait(30)
        time.sleep(2)
        own_postgres.stop()
        own_postgres.start()
        time.sleep(3)
        is_over.set()
        for each in working:
            each.result(60)
        assert set(refused) == {503}
        sessions = connect(own_postgres.url)
        assert_all_done_once(sessions, set(accepted.values()), api, key)
        dispose(sessions)


@contextmanager
def stopped(server: Postgres) -> Iterator[None]:
    """With SIGSTOP for all of the server's processes: its sockets take what is sent, and nobody answers."""
    assert server._process is not None
    family = [psutil.Process(server._process.pid)]
    family += family[0].children(recursive=True)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.slow
def test_a_server_that_is_stopped(own_postgres: Postgres, settings: Settings, tmp_path: Path) -> None:
    """No request hangs, more of them than there are threads hear 503, and all is well when the server goes on."""
    own = settings.model_copy(update={"database_url": SecretStr(own_postgres.url)})
    headers = {"Authorization": f"Bearer {create_key(own_postgres.url, 'stopped')}"}

    def ask(path: str) -> tuple[int, float]:
        began = time.monotonic()
        answer = httpx2.get(f"{api.url}{path}", headers=headers, trust_env=False, timeout=60)
        return answer.status_code, time.monotonic() - began

    with ApiProcess(own, tmp_path / "api.log") as api, ThreadPoolExecutor(60) as threads:
        before = list(threads.map(ask, ["/v1/jobs"] * 30))
        assert {status for status, _ in before} == {200}
        usual_s = max(took_s for _, took_s in before)
        with stopped(own_postgres):
            for wave in range(3):
                asked = [threads.submit(ask, "/v1/jobs") for _ in range(50)]
                assert ask("/healthz/live")[0] == 200 and ask("/healthz/ready")[0] == 503
                answers = [each.result() for each in asked]
                assert {status for status, _ in answers} == {503}, wave
                assert max(took_s for _, took_s in answers) < 12 + 10 * usual_s, wave  # 8 if nothing else is to do
            assert ask("/healthz/live")[1] < 5 + 10 * usual_s
        wait_until(lambda: ask("/v1/jobs")[0] == 200)
        assert {status for status, _ in threads.map(ask, ["/v1/jobs"] * 30)} == {200}
        assert ask("/healthz/ready")[0] == 200


ASKS_LATER = """
import sys
from sqlalchemy import text
from api.store.engine import connect

with connect(sys.argv[1], answer_s=1).begin() as session:
    session.execute(text("SELECT 1"))
    print("connected", flush=True)
    sys.stdin.readline()
    print(session.scalar(text("SELECT 'answered'")))
"""


def test_a_machine_that_was_suspended_does_not_blame_the_server(own_postgres: Postgres) -> None:
    """While both are stopped the clock goes on, for longer than we wait for a silent server."""
    command = [sys.executable, "-c", ASKS_LATER, own_postgres.url]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.readline() == "connected\n"
        with stopped(own_postgres):
            client.stdin.write("ask\n")
            client.stdin.flush()
            time.sleep(0.5)
            client.send_signal(signal.SIGSTOP)
            time.sleep(1 + DATABASE_SILENT_S + 1)
            client.send_signal(signal.SIGCONT)
            time.sleep(0.3)
        assert client.stdout.readline() == "answered\n"


@pytest.mark.slow
def test_a_worker_that_hears_nothing_ends_its_engine_in_time(own_postgres: Postgres, settings: Settings) -> None:
    """The heartbeat waits for an answer for longer than the lease lasts."""
    sessions = connect(own_postgres.url, answer_s=30)
    with sessions.begin() as session:
        session.execute(text("DELETE FROM job"))
        jobs.submit(session, **job_columns())
        lease = leases.claim(session, worker="w", lease_s=settings.lease_s)
    assert lease is not None
    lost = threading.Event()
    began = time.monotonic()
    with stopped(own_postgres):
        held = HeldLease(lease, sessions, settings, claimed_at=began, on_order=print, on_lost=lost.set)
        held.__enter__()
        assert lost.wait(settings.lease_s)
    assert 1 < time.monotonic() - began < settings.lease_s
    held.__exit__(None, None, None)
    dispose(sessions)


def assert_all_done_once(sessions: Sessions, accepted: set[str], api: ApiProcess, key: str) -> None:
    def states() -> dict[str, str]:
        with sessions.begin() as session:
            return dict(session.execute(select(Job.id, Job.state).where(Job.id.in_(accepted))).all())

    wait_until(lambda: set(states().values()) == {"succeeded"}, timeout_s=240, note=states)
    assert states().keys() == accepted
    with sessions.begin() as session:
        once = select(Attempt.job_id).where(Attempt.outcome == "succeeded").group_by(Attempt.job_id)
        twice = session.scalars(once.having(func.count() > 1)).all()
        errors = session.scalars(select(Attempt.error).where(Attempt.error.is_not(None))).all()
    assert twice == [] and errors == []
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx2.get(f"{api.url}/healthz/ready", trust_env=False, headers=headers).json()["database"] == "ok"


def test_a_commit_whose_answer_is_lost(settings: Settings, sessions: Sessions, make_model: MakeModel) -> None:
    """The client hears 503, sends the same key again and gets the job that is there."""
    key = create_key(sessions, "k")
    body = {"model": {"path": str(make_model())}, "config": {"preset": "fp8"}}
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "mine"}
    with Line(settings) as line, TestClient(create_app(line.settings), headers=headers) as client:
        line.cut_after_commit(b"INSERT INTO job ")
        first = client.post("/v1/jobs", json=body)
        assert (first.status_code, first.json()["code"]) == (503, "database_unavailable")
        assert first.headers["Retry-After"]
        assert line.num_cut == 1
        second = client.post("/v1/jobs", json=body)
        assert (second.status_code, second.headers["Idempotency-Replayed"]) == (202, "true")
    with sessions.begin() as session:
        assert session.scalars(select(Job.id)).all() == [second.json()["id"]]


@pytest.mark.slow
def test_a_finish_whose_answer_is_lost(
    settings: Settings, sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker,
    wait_for: WaitFor,
) -> None:  # fmt: skip
    """The worker asks again, finds the job is no longer its own, and leaves it as it is: succeeded, once."""
    with Line(settings) as line:
        line.cut_after_commit(b"INSERT INTO artifact ")
        worker = start_worker(line.settings)
        job_id = submit(make_model())
        wait_for(job_id, "succeeded")
        assert line.num_cut == 1
        wait_for(submit(make_model("next")), "succeeded")
        assert worker.drain() == 0
    assert outcomes(sessions, job_id) == ["succeeded"]


@pytest.mark.slow
def test_rows_that_somebody_locks(
    server: Server, sessions: Sessions, make_model: MakeModel, submit: Submit, start_worker: StartWorker,
    wait_for: WaitFor,
) -> None:  # fmt: skip
    """More requests wait for a lock than there are connections: each ends with 503 in time, and a worker beats on."""
    start_worker()
    running = submit(make_model(mode="slow_once"))
    wait_for(running, "running")
    locked = submit(run_at=text("clock_timestamp() + interval '1 hour'"))

    def edit(number: int) -> tuple[int, str, float]:
        began = time.monotonic()
        with server.connect() as client:
            answer = client.patch(f"/v1/jobs/{locked}", json={"name": str(number)}, headers={"If-Match": "*"})
        return answer.status_code, answer.json()["code"], time.monotonic() - began

    with ThreadPoolExecutor(30) as threads, sessions.begin() as session:
        session.execute(text("SELECT 1 FROM job WHERE id = :id FOR UPDATE"), {"id": locked})
        answers = list(threads.map(edit, range(30)))
    assert {answer[:2] for answer in answers} == {(503, "database_unavailable")}
    assert max(took_s for *_, took_s in answers) < 30, "none waits for its turn after all others"
    with sessions.begin() as session:  # three leases' time has passed
        job = session.get(Job, running)
        assert job and (job.state, job.attempt, job.lost_count) == ("running", 1, 0)
    with server.connect() as client:
        assert client.patch(f"/v1/jobs/{locked}", json={"name": "x"}, headers={"If-Match": "*"}).status_code == 200
