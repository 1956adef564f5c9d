"""The local stack as a person runs it: `bitfoundry up` in a process of its own, asked over HTTP, ended in every way."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bitfoundry.client.connection import Connection
from bitfoundry.client.service import Client
from bitfoundry.errors import ApiError
from bitfoundry.local.stack import LocalStack
from tests.support.service import make_model
from tests.support.waiting import wait_until


def _hear_interrupts() -> None:
    """As in a terminal. A shell lets what it runs in the background ignore Ctrl-C, and so do its children: these tests
    may be run like that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ignore_interrupts() -> None:
    """As a script's shell arranges for what it runs with &."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


Up = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def up(home: Path) -> Iterator[Up]:
    """Start `bitfoundry up` and wait until it says that it is ready."""
    started: list[subprocess.Popen[str]] = []

    def start(prepare: Callable[[], None] = _hear_interrupts) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bitfoundry", "up", "--home", str(home), "--port", "0", "--json"]
        command += ["--models", str(home.parent)]
        environment = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "BROKER_URL"}}
        environment["PYTHONFAULTHANDLER"] = "1"
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            preexec_fn=prepare,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        said = ""
        while "}" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            said += line
        assert json.loads(said)["home"] == str(home.resolve())
        return process

    yield start
    for process in started:
        below = family(process) if process.poll() is None else []
        process.kill()
        process.communicate()
        left_of(below)  # they still write to the home, which goes next


def status_of(process: subprocess.Popen[str]) -> int:
    """Its exit status. One that does not end says where it stands."""
    try:
        return process.wait(90)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        raise AssertionError(process.communicate()[1]) from None


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All that runs because of it: the server processes have sessions of their own but stay its descendants."""
    return psutil.Process(process.pid).children(recursive=True)


def left_of(processes: list[psutil.Process], limit_s: float = 20.0) -> list[str]:
    """The command lines of those that still run after a while."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    living = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return [" ".join(process.cmdline()) for process in living]


def client_of(home: Path) -> Client:
    connection = Connection.read(home)
    assert connection is not None
    return Client(connection.url, connection.api_key)


def is_ready(client: Client, part: str) -> bool:
    try:
        return bool(client.readiness().json().get(part) == "ok")
    except ApiError:
        return False


def new_child(process: subprocess.Popen[str], program: str, before: int) -> bool:
    children = psutil.Process(process.pid).children()
    return any(each.name() == program and each.pid != before for each in children)


def connections(process: psutil.Process) -> list[Any]:
    """Over the network; none of a process that has ended meanwhile, as backends of PostgreSQL do."""
    with suppress(psutil.NoSuchProcess):
        return process.net_connections("inet")
    return []


@pytest.mark.slow
def test_up_serves_keeps_its_data_and_leaves_nothing(home: Path, up: Up) -> None:
    first = up()
    processes = family(first)
    names = {process.name() for process in processes}
    assert {"postgres", "valkey-server"} <= names
    with client_of(home) as client:
        assert client.presets()
        with pytest.raises(ApiError) as refused:
            client.submit("/nowhere", config="fp8")
        assert refused.value.status == 422
    key = Connection.read(home)
    assert stat.S_IMODE((home / "connection.json").stat().st_mode) == 0o600
    listening = [each for process in processes for each in connections(process) if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
    assert len(listening) == 1  # the API; the engines have no port
    assert key is not None
    for log in (home / "logs").iterdir():
        assert key.api_key.encode() not in log.read_bytes(), log.name

    first.send_signal(signal.SIGINT)
    assert status_of(first) == 0
    assert left_of(processes) == []

    second = up()
    found = Connection.read(home)
    assert found is not None and found.api_key == key.api_key  # the database knew it
    second.send_signal(signal.SIGTERM)
    assert status_of(second) == 0


@pytest.mark.slow
def test_a_killed_up_takes_everything_with_it_and_starts_again(home: Path, up: Up) -> None:
    first = up()
    processes = family(first)
    assert len(processes) >= 4
    first.kill()
    first.wait()
    assert left_of(processes) == []
    up()
    with client_of(home) as client:
        assert client.presets()


@pytest.mark.slow
def test_a_killed_worker_comes_back(home: Path, up: Up) -> None:
    process = up()

    def is_worker(each: psutil.Process) -> bool:
        try:
            return each.status() != psutil.STATUS_ZOMBIE and each.cmdline()[-2:] == ["-m", "worker"]
        except psutil.NoSuchProcess:  # gone since it was listed
            return False

    def workers() -> list[psutil.Process]:
        return [each for each in family(process) if is_worker(each)]

    (before,) = workers()
    before.kill()
    wait_until(lambda: [each for each in workers() if each.pid != before.pid])
    assert len(workers()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("program", "part"), [("postgres", "database"), ("valkey-server", "broker")])
def test_a_killed_engine_comes_back(program: str, part: str, home: Path, up: Up) -> None:
    """With its data, and where the API and the worker look for it: they are not started again."""
    process = up()
    with client_of(home) as client:
        name = client.submit(make_model(home), config="fp8", name="before").name
    below = psutil.Process(process.pid).children()
    (engine,) = [each for each in below if each.name() == program]
    engine.kill()
    psutil.wait_procs([engine], timeout=20)

    with client_of(home) as client:
        wait_until(lambda: is_ready(client, part) and new_child(process, program, engine.pid))
        assert [job.name for job in client.list()] == [name]
    others = {each.pid for each in below} - {engine.pid}
    assert others <= {each.pid for each in psutil.Process(process.pid).children()}
    process.terminate()
    assert status_of(process) == 0
    assert process.stderr is not None
    said = process.stderr.read()
    assert said.count("ended (status -9): restarting it") == 1, said


@pytest.mark.slow
def test_an_up_that_a_script_runs_in_the_background_hears_interrupts(home: Path, up: Up) -> None:
    process = up(_ignore_interrupts)
    process.send_signal(signal.SIGINT)
    assert status_of(process) == 0


@pytest.mark.slow
def test_a_second_up_on_the_same_home_is_refused(home: Path, up: Up) -> None:
    up()
    command = [sys.executable, "-m", "bitfoundry", "up", "--home", str(home), "--port", "0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "in use by another bitfoundry" in second.stderr
    with client_of(home) as client:  # the first did not notice
        assert client.presets()


def test_a_taken_port_is_a_clear_error(home: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "bitfoundry", "up", "--home", str(home), "--port", str(taken.getsockname()[1])]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "--port" in ran.stderr
    assert left_of([each for each in psutil.Process().children(recursive=True) if each not in before], 0) == []


@pytest.mark.slow
def test_a_failure_on_the_way_up_ends_what_had_started(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("BROKER_URL", raising=False)

    def broken(self: LocalStack, database_url: str) -> None:
        raise RuntimeError("no schema today")

    monkeypatch.setattr(LocalStack, "_migrate", broken)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match="no schema today"):
        LocalStack(home, 0).start()
    after = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left_of(after) == []


def test_the_environment_replaces_the_engines(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg://elsewhere/x")
    monkeypatch.setenv("BROKER_URL", "redis://elsewhere")
    stack = LocalStack(home, 0)
    assert stack._start_engines() == ("postgresql+psycopg://elsewhere/x", "redis://elsewhere")
    assert stack._engines == []
