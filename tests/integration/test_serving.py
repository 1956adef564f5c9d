"""``python -m api``: where it listens, and when it does not."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from api.__main__ import is_loopback, main
from api.http.security import create_key
from api.settings import Settings
from api.store.accounts import keys
from api.store.engine import Sessions
from bitfoundry.local.stack import LocalStack
from tests.support.params import with_rare
from tests.support.service import ROOT, Server, is_alive, wait_gone
from tests.support.waiting import PATIENCE_S, wait_until

Serve = Callable[..., str]


@pytest.fixture
def environment(settings: Settings, sessions: Sessions) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BITFOUNDRY_")} | {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "BROKER_URL": settings.broker_url.get_secret_value(),
        "BITFOUNDRY_DATA_DIR": str(settings.data_dir),
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def serve(environment: dict[str, str], started: list[subprocess.Popen[bytes]], tmp_path: Path) -> Serve:
    """``serve("0.0.0.0")``: the URL of a server that answers on 127.0.0.1; what it says is in ``said``."""

    def start(host: str, *options: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "api", "serve", "--host", host, "--port", str(port), *options]
        with (tmp_path / "said").open("w") as said:
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=said))
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert started[-1].poll() is None
            with suppress(httpx2.TransportError):
                httpx2.get(f"{url}/healthz/live", trust_env=False)
                return True
            return False

        wait_until(answers)
        return url

    return start


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """The servers that ``serve`` started."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize(
    "host", with_rare(["0.0.0.0", "::", "192.0.2.1", "example.org"], ["::", "192.0.2.1", "example.org"])
)
def test_nobody_listens_in_the_open_before_there_is_a_key(
    host: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("uvicorn.run", lambda *given, **options: pytest.fail("it listens"))
    assert main(["serve", "--host", host, "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "no_api_key" in said and "create-key" in said


@pytest.mark.slow
def test_a_revoked_key_is_none(environment: dict[str, str], sessions: Sessions) -> None:
    made = run(environment, "create-key", "first", "--scope", "jobs:read")
    assert re.fullmatch(r"bf_[0-9a-f]{12}_[\w-]{43}\n", made.stdout)
    with sessions.begin() as session:
        assert keys.is_any_valid(session)
        row = keys.find(session, "prj_" + "0" * 32, made.stdout.split("_")[1])
        assert row and row.scopes == ["jobs:read"]
        keys.revoke(session, row)
    assert run(environment, "serve", "--host", "0.0.0.0", "--port", "0").returncode == 1


@pytest.mark.slow
def test_with_a_key_it_listens_and_wants_it(environment: dict[str, str], serve) -> None:
    key = run(environment, "create-key", "first").stdout.strip()
    url = serve("0.0.0.0")
    with httpx2.Client(base_url=url, trust_env=False) as client:
        assert client.get("/v1/jobs").status_code == 401
        assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.slow
def test_on_loopback_it_needs_none(serve) -> None:
    assert httpx2.get(f"{serve('127.0.0.1')}/v1/jobs", trust_env=False).status_code == 401


@pytest.mark.slow
def test_several_processes_share_the_port_and_end_together(
    serve: Serve, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url = serve("127.0.0.1", "--processes", "2")

    def await_processes(count: int) -> list[int]:
        """All that have been started so far, once so many are up."""
        said = (tmp_path / "said").read_text
        wait_until(lambda: said().count("Application startup complete") >= count, note=said)
        return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", said())]

    first, second = await_processes(2)
    os.kill(first, signal.SIGKILL)
    for _ in range(20):  # the other one answers
        assert httpx2.get(f"{url}/v1/jobs", trust_env=False, timeout=PATIENCE_S).status_code == 401
    pids = await_processes(3)
    assert pids[:2] == [first, second] and is_alive(second)
    started[0].kill()
    wait_gone(pids)


def test_no_process_is_started_for_a_wrong_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--processes", "0"])
    assert ended.value.code == 2 and "'0' is not a valid number of processes (1 or more)" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unsafe_secret_key_file_stops_it(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    path.write_text("A" * 44)
    path.chmod(0o644)
    refused = run(environment | {"BITFOUNDRY_SECRET_KEY_FILE": str(path)}, "serve", "--port", "0")
    assert (refused.returncode, "unsafe_secret_key_file" in refused.stderr) == (1, True)


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")))


def test_the_local_stack_wants_a_key_that_may_do_everything(server: Server, sessions: Sessions, tmp_path: Path) -> None:
    """A key of an earlier version, without the newer scopes, is replaced at the next start."""
    stack = LocalStack(tmp_path)
    stack.url = server.url
    older = create_key(sessions, "older", scopes=["jobs:read", "jobs:write"])
    assert [stack._accepts(key) for key in (server.key, older, "bf_000000000000_" + "A" * 43)] == [True, False, False]
