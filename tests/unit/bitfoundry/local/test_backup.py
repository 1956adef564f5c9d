"""Backup and restore of a local stack: a round trip, damage, and what is killed on the way."""

import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from api.store.vault import write_new_key
from bitfoundry.client.service import Client
from bitfoundry.errors import StackError
from bitfoundry.local.backup import back_up, find_vault, restore
from bitfoundry.local.stack import LocalStack, Postgres
from tests.support.service import STUB_ENGINE, make_model

FILE = "artifacts/job_1/abc/model.safetensors"


def say(message: str) -> None:
    print(message)


def query(server: Postgres, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.url.replace("+psycopg", "", 1)) as session:
        found = session.execute(statement)
        return found.fetchall() if found.description else []


@pytest.fixture
def filled(home: Path) -> Iterator[Path]:
    """A stopped stack with an artifact, and no more of a database than that takes."""
    server = Postgres(home, durable=False)
    server.start()
    query(server, f"CREATE TABLE artifact AS SELECT '{home}/artifacts/job_1/abc' AS path")
    server.stop()
    (home / FILE).parent.mkdir(parents=True)
    (home / FILE).write_bytes(os.urandom(3 << 20))
    write_new_key(home / "secret.key")
    yield home


def run(*args: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "bitfoundry", *map(str, args)], stdout=-1, stderr=-1)


@pytest.mark.slow
def test_a_stopped_stack_there_and_back(filled: Path, tmp_path: Path) -> None:
    file, there = tmp_path / "a.backup", filled.with_name("there")
    back_up(filled, file, say)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a.backup"]
    restore(file, there, say, vault=find_vault(filled))
    assert (there / FILE).read_bytes() == (filled / FILE).read_bytes()
    assert (there / "secret.key").read_text() == (filled / "secret.key").read_text()
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    server = Postgres(there, durable=False)
    server.start()
    assert query(server, "SELECT path FROM artifact") == [(f"{there}/artifacts/job_1/abc",)]
    server.stop()
    with pytest.raises(StackError, match="is not empty"):
        restore(file, there, say, vault=find_vault(filled))
    with pytest.raises(StackError, match="exists"):
        back_up(filled, file, say)


@pytest.mark.slow
def test_a_damaged_backup_is_refused(filled: Path, tmp_path: Path) -> None:
    file, there = tmp_path / "a.backup", filled.with_name("there")
    back_up(filled, file, say)
    with tarfile.open(file) as tar:
        at = tar.getmember(FILE).offset_data
    whole = file.read_bytes()
    file.write_bytes(whole[: at + 5] + bytes([whole[at + 5] ^ 1]) + whole[at + 6 :])
    with pytest.raises(StackError, match="has changed"):
        restore(file, there, say, vault=find_vault(filled))
    file.write_bytes(whole[: at + 100_000])
    with pytest.raises(StackError, match="not a complete backup"):
        restore(file, there, say, vault=find_vault(filled))
    assert not there.exists()
    file.write_bytes(whole)
    restore(file, there, say, vault=find_vault(filled))  # over what the refused ones have left


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.8, 1.5, 2.5, 4.0])
def test_killed_on_the_way_nothing_looks_whole(after_s: float, filled: Path, tmp_path: Path) -> None:
    file, there = tmp_path / "a.backup", filled.with_name("there")
    process = run("backup", file, "--home", filled)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if not file.exists():
        back_up(filled, file, say)
    process = run("restore", file, "--home", there, "--key-file", filled / "secret.key")
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if not there.exists():
        restore(file, there, say, vault=find_vault(filled))
    assert (there / FILE).read_bytes() == (filled / FILE).read_bytes()
    server = Postgres(there, durable=False)
    server.start()
    assert query(server, "SELECT path FROM artifact") == [(f"{there}/artifacts/job_1/abc",)]
    server.stop()


@pytest.mark.slow
def test_a_running_stack_there_and_back(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BITFOUNDRY_ENGINE_COMMAND", f"{sys.executable} -S {STUB_ENGINE}")
    file, there = tmp_path / "a.backup", home.with_name("there")
    with LocalStack(home, 0, model_roots=[home.parent]) as stack, Client(stack.url, stack.api_key) as client:
        job = client.submit(make_model(home), config="int8_dynamic")
        assert client.wait(job.id, timeout_s=120).state == "succeeded"
        before = {each.path: each.sha256 for each in client.artifacts(job.id)}
        process = run("backup", file, "--home", home)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert b"secret.key" in err
    process = run("restore", file, "--home", there, "--key-file", home / "secret.key")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    home.rename(home.with_name("gone"))
    with LocalStack(there, 0) as stack, Client(stack.url, stack.api_key) as client:
        assert {each.path: each.sha256 for each in client.artifacts(job.id)} == before
        client.download(job.id, tmp_path / "downloaded")  # checks each hash
