"""The embedded Valkey on the real binary."""

import shutil
import stat
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redis

from bitfoundry.errors import StackError
from bitfoundry.local import valkey as module
from bitfoundry.local.stack import Valkey
from bitfoundry.local.supervision import Supervised
from tests.support.waiting import wait_until


def ask(url: str) -> dict[str, object]:
    with redis.Redis.from_url(url.replace("redis+socket://", "unix://")) as session:
        return dict(session.info("server"))


def test_it_listens_on_a_private_socket_alone(home: Path) -> None:
    server = Valkey(home)
    url = server.start()
    socket = Path(url.removeprefix("redis+socket://"))
    assert url.startswith("redis+socket:///")
    assert ask(url)["tcp_port"] == 0
    assert stat.S_IMODE(socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    server.stop()
    assert not socket.parent.exists()


def test_stop_leaves_no_process_and_start_works_again(home: Path) -> None:
    server = Valkey(home)
    pid = int(str(ask(server.start())["process_id"]))
    server.stop()
    server.stop()
    assert not psutil.pid_exists(pid)
    assert int(str(ask(server.start())["process_id"])) != pid
    server.stop()


def test_a_server_that_lost_its_parent_is_ended_first(home: Path) -> None:
    orphan = Valkey(home)
    pid = int(str(ask(orphan.start())["process_id"]))
    orphan._lock.release()
    server = Valkey(home)
    assert int(str(ask(server.start())["process_id"])) != pid
    server.stop()
    orphan.stop()


def test_two_at_once_on_one_home_are_refused(home: Path) -> None:
    server = Valkey(home)
    url = server.start()
    with pytest.raises(StackError, match="in use"):
        Valkey(home).start()
    assert ask(url)
    server.stop()


def test_a_program_that_is_nowhere_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.delenv("BITFOUNDRY_VALKEY", raising=False)
    with pytest.raises(StackError) as missing:
        module.find_binary()
    assert "BROKER_URL" in missing.value.hint


@pytest.mark.parametrize("remove", ["file", "folder"])
def test_a_server_whose_socket_was_removed_comes_back(remove: str, home: Path) -> None:
    """As cleaners of temporary folders do. The URL stays the same: clients find it again."""
    server = Valkey(home)
    url = server.start()
    socket = Path(url.removeprefix("redis+socket://"))
    tended = Supervised(server, print)
    tended.look()
    shutil.rmtree(socket.parent) if remove == "folder" else socket.unlink()

    def answers() -> bool:
        tended.look()
        with suppress(redis.RedisError):
            return bool(ask(url))
        return False

    wait_until(answers)
    server.stop()
