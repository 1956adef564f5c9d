"""`bitfoundry doctor` against a real service, and against what is amiss with it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from api.http.security import create_key
from api.store import migrate
from api.store.engine import Sessions
from bitfoundry.commands import doctor
from bitfoundry.commands import main as cli
from quantcore.sandbox import landlock
from tests.support.accelerator import on_accelerator
from tests.support.device_counts import Counts
from tests.support.service import Server, WorkerProcess


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> Any:
    monkeypatch.setattr(
        doctor, "ASK_TORCH", """print('{"version": "2.x", "devices": ["one"]}')"""
    )  # the real one takes long
    monkeypatch.setenv("BITFOUNDRY_CONFIG", str(tmp_path / "none.toml"))

    def look(key: str = server.key, url: str = server.url) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = cli.run(["doctor", "--url", url, "--api-key", key, "--home", str(tmp_path), "--json"])
        return status, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}

    return look


@contextmanager
def older_schema(sessions: Sessions) -> Iterator[None]:
    with sessions.begin() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    try:
        yield
    finally:
        with sessions.begin() as session:
            session.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": migrate.newest()})


@pytest.mark.slow
def test_what_is_well_and_what_is_not(
    look: Callable[..., Any], server: Server, sessions: Sessions, start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Any], submit: Callable[..., str], make_model: Callable[..., Any],
) -> None:  # fmt: skip
    status, found = look()
    assert (status, found["workers"]["status"]) == (1, "failed")
    assert "python -m worker" in found["workers"]["hint"]
    start_worker()
    wait_for(submit(make_model()), "succeeded")
    status, found = look()
    here = ["python", "torch", "devices", "disk", "landlock"]
    names = [*here, "service", "clock", "database", "broker", "room", "schema", "key", "workers"]
    assert (status, list(found)) == (0, names)
    assert {finding["status"] for finding in found.values()} <= {"ok", "warning"}
    assert found["devices"]["detail"] == "one"
    assert found["landlock"]["status"] == ("ok" if landlock.abi() else "warning")
    status, found = look(key=create_key(sessions, "r", ["jobs:read"]))
    assert (status, found["key"]["detail"]) == (0, "r: jobs:read")
    status, found = look(key="bf_nonsense")
    assert (status, found["key"]["status"]) == (1, "failed") and "workers" not in found
    with older_schema(sessions):
        status, found = look()
    assert (status, found["schema"]["detail"]) == (1, "older") and "alembic" in found["schema"]["hint"]
    status, found = look(url="http://127.0.0.1:1")
    assert (status, found["service"]["status"]) == (1, "failed") and "database" not in found


def test_without_a_service_only_the_engine_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ASK_TORCH", """print('{"version": "2.x", "devices": ["one"]}')""")
    monkeypatch.setenv("BITFOUNDRY_CONFIG", str(tmp_path / "none.toml"))
    for name in ("BITFOUNDRY_URL", "BITFOUNDRY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert cli.run(["doctor", "--home", str(tmp_path), "--json"]) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert list(found)[-1] == "service" and found["service"]["status"] == "ok"
    assert "bitfoundry up" in found["service"]["hint"] and "bitfoundry selftest" in found["devices"]["hint"]
    assert cli.run(["doctor", "--home", str(tmp_path), "--url", "http://127.0.0.1:1", "--json"]) == 1  # without a key


def test_a_kernel_without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    finding = doctor._landlock()
    assert (finding.status, finding.detail) == ("warning", "not supported by this kernel") and "5.19" in finding.hint


def test_torch_is_asked_in_a_process_that_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK_TORCH", "import os; os.abort()")
    [finding] = doctor._torch()
    assert finding.status == "failed" and "driver" in finding.hint


def test_torch_names_the_devices_that_jobs_would_use() -> None:
    """On any backend, not only on CUDA."""
    said = []

    def ask(counts: Counts) -> str:
        with redirect_stdout(StringIO()) as out:
            exec(doctor.ASK_TORCH, {})
        return out.getvalue()

    for work in (lambda: ask(Counts()), lambda: on_accelerator(ask)):
        said.append(json.loads(work())["devices"])
    assert said == [[], ["sim:0"]]


def test_people_read_words(look: Callable[..., Any], server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--url", server.url, "--api-key", server.key]) == 1
    assert "failed  workers" in capsys.readouterr().out
