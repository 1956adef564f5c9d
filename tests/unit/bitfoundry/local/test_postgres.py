"""The embedded PostgreSQL on the real binaries: it finds its data again, whatever ended the last run."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest

from bitfoundry.errors import StackError
from bitfoundry.local import postgres as module
from bitfoundry.local.child import Owner
from bitfoundry.local.stack import Postgres
from bitfoundry.local.supervision import Supervised
from tests.support.waiting import wait_until

START_AND_WAIT = """
import sys, time
from pathlib import Path
from bitfoundry.local.stack import Postgres
server = Postgres(Path(sys.argv[1]), durable=False)
server.start()
print("started", flush=True)
time.sleep(600)
"""


def execute(server: Postgres, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.url.replace("+psycopg", "", 1)) as session:
        found = session.execute(statement)
        return found.fetchall() if found.description else []


def start_in_child(home: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", START_AND_WAIT, home], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    return child


def reap(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_stop_leaves_no_process_and_no_socket_and_a_second_start_finds_its_data(home: Path) -> None:
    server = Postgres(home, durable=False)
    first_url = server.start()
    sockets = Path(first_url.partition("host=")[2])
    processes = module._servers_in(server.data)
    assert len(processes) == 1
    execute(server, "CREATE TABLE kept AS SELECT 7 AS n")
    server.stop()
    server.stop()  # harmless
    assert not psutil.pid_exists(processes[0].pid)
    assert not sockets.exists()
    assert server.start() == first_url
    assert execute(server, "SELECT n FROM kept") == [(7,)]
    server.stop()


def test_every_folder_is_private_no_port_is_open_and_a_second_one_on_its_home_is_refused(home: Path) -> None:
    server = Postgres(home, durable=False)
    sockets = Path(server.start().partition("host=")[2])
    try:
        for folder in (home, server.data, home / "logs", sockets):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        assert execute(server, "SHOW listen_addresses") == [("",)]
        assert len(os.fsencode(sockets / ".s.PGSQL.5432")) < 100
        account = module._servers_in(server.data)[0].uids().real
        assert account != 0
        assert account == server.data.stat().st_uid
        with pytest.raises(StackError, match=f"in use by another bitfoundry .pid {os.getpid()}") as refused:
            Postgres(home).start()
        assert "--home" in refused.value.hint
        assert execute(server, "SELECT 1") == [(1,)]  # the refusal did not hurt the first
    finally:
        server.stop()


@pytest.mark.slow
def test_a_killed_parent_takes_the_server_with_it(home: Path) -> None:
    child = start_in_child(home)
    data = home / "postgres"
    assert module._servers_in(data)
    reap(child)
    psutil.wait_procs(module._servers_in(data), timeout=20)
    assert module._servers_in(data) == []


@pytest.mark.slow
def test_a_killed_server_starts_again(home: Path) -> None:
    child = start_in_child(home)
    module._servers_in(home / "postgres")[0].send_signal(signal.SIGKILL)
    reap(child)
    server = Postgres(home, durable=False)
    server.start()
    assert execute(server, "SELECT 1") == [(1,)]
    server.stop()


@pytest.mark.slow
def test_a_server_that_was_told_to_end_does_not_wait_for_its_clients(home: Path) -> None:
    """SIGTERM is PostgreSQL's "smart" shutdown: it takes no new client, and waits for those it has for ever."""
    server = Postgres(home, durable=False)
    server.start()
    tended = Supervised(server, print)
    with psycopg.connect(server.url.replace("+psycopg", "", 1)) as held:
        assert server._process is not None
        first = server._process.pid
        server._process.terminate()
        limit = time.monotonic() + 60
        while True:
            tended.look()
            with suppress(psycopg.OperationalError):
                assert execute(server, "SELECT 1") == [(1,)]
                if server._process.pid != first:
                    break
            assert time.monotonic() < limit, "it takes no new client"
            time.sleep(0.05)
        with pytest.raises(psycopg.OperationalError):
            held.execute("SELECT 1")
    server.stop()


@pytest.mark.slow
def test_a_server_that_lost_its_parent_is_ended_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitfoundry.local.child._LIBC", None)  # as on macOS: no parent-death signal
    orphan = Postgres(home, durable=False)
    orphan.start()
    orphan._lock.release()  # what the kernel does when its holder dies
    left = module._servers_in(orphan.data)
    server = Postgres(home, durable=False)
    server.start()
    assert execute(server, "SELECT 1") == [(1,)]
    assert [process.pid for process in module._servers_in(server.data)] != [process.pid for process in left]
    server.stop()
    orphan.stop()


@pytest.mark.slow
def test_a_pid_file_that_names_a_stranger_does_no_harm(home: Path) -> None:
    """After a crash the number may belong to another program of the same account: PostgreSQL alone would give up."""
    server = Postgres(home, durable=False)
    server.start()
    pid_file = server.data / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    server.stop()
    account = server.data.stat()
    stranger = subprocess.Popen(["sleep", "60"], user=account.st_uid if os.geteuid() == 0 else None)
    try:
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]))
        os.chown(pid_file, account.st_uid, account.st_gid)
        server.start()
        assert stranger.poll() is None
        server.stop()
    finally:
        stranger.kill()
        stranger.wait()


def test_half_an_initdb_is_thrown_away(home: Path) -> None:
    left = home / "postgres.new"
    left.mkdir(parents=True)
    (left / "PG_VERSION").write_text("18\n")
    server = Postgres(home, durable=False)
    server.start()
    assert not left.exists()
    server.stop()


@pytest.mark.slow
def test_a_failed_start_shows_the_log_and_leaves_the_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Postgres(home, durable=False)
    server.start()
    server.stop()
    (server.data / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(StackError, match="no_such_setting"):
        server.start()
    (server.data / "postgresql.conf").write_text("")
    server.start()
    server.stop()


def test_binaries_that_are_nowhere_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(StackError) as missing:
        module.find_binaries()
    assert "bitfoundry[local]" in missing.value.hint
    assert "DATABASE_URL" in missing.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes accounts")
def test_binaries_that_the_account_cannot_reach_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .venv below /root (0700): the account cannot execute it, so it gets a copy."""
    shared = Path(tempfile.mkdtemp(prefix="bf-test-", dir="/tmp"))
    shared.chmod(0o755)
    monkeypatch.setattr(module, "SHARED_BINARIES", shared / "lib")
    hidden = tmp_path / "venv"
    hidden.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    (hidden / "pginstall").symlink_to(module.find_binaries().parent)
    owner = Owner.named("postgres", "nobody")
    try:
        copy = module._reachable(hidden / "pginstall" / "bin", owner)
        assert copy.is_relative_to(shared)
        assert module._runs(copy, owner)
        assert module._reachable(hidden / "pginstall" / "bin", owner) == copy  # the second time it is there
    finally:
        module.shutil.rmtree(shared)


@pytest.mark.parametrize("remove", ["file", "folder"])
def test_a_server_whose_socket_was_removed_comes_back(remove: str, home: Path) -> None:
    """As cleaners of temporary folders do. The URL stays the same: clients find it again."""
    server = Postgres(home, durable=False)
    sockets = Path(server.start().partition("host=")[2])
    tended = Supervised(server, print)
    tended.look()
    shutil.rmtree(sockets) if remove == "folder" else (sockets / ".s.PGSQL.5432").unlink()

    def answers() -> bool:
        tended.look()
        with suppress(psycopg.OperationalError):
            return execute(server, "SELECT 1") == [(1,)]
        return False

    wait_until(answers)
    server.stop()
