"""Private folders and the lock of a home."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bitfoundry.client.connection import default_home
from bitfoundry.errors import StackError
from bitfoundry.local import folders
from bitfoundry.local.folders import Lock


def test_a_folder_that_was_open_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    folders.private_dir(tmp_path / "open")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StackError, match="not a folder"):
        folders.private_dir(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(StackError, match="belongs to uid 65534"):
        folders.private_dir(tmp_path / "theirs")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_squatted_socket_folder_is_replaced_by_a_fresh_one(tmp_path: Path) -> None:
    taken = folders.socket_dir(tmp_path, "test")
    os.chown(taken, 65534, 65534)
    fresh = folders.socket_dir(tmp_path, "test")
    try:
        assert fresh != taken
        assert fresh.stat().st_uid == os.geteuid()
    finally:
        fresh.rmdir()
        taken.rmdir()


def test_a_long_runtime_folder_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    chosen = folders.socket_dir(tmp_path, "test")
    chosen.rmdir()
    assert chosen.parent == Path("/tmp")


def test_a_short_runtime_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert folders.socket_dir(tmp_path, "test").parent == Path(runtime)


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    take = (
        "import sys, os; from pathlib import Path; from bitfoundry.local.folders import Lock; "
        "Lock(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", take, tmp_path / "lock"], check=False)
    with Lock(tmp_path / "lock"), pytest.raises(StackError, match=f"pid {os.getpid()}"):
        Lock(tmp_path / "lock").acquire()
    with Lock(tmp_path / "lock"):
        pass


def test_the_home_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITFOUNDRY_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_home() == tmp_path / "bitfoundry"
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path / "own"))
    assert default_home() == tmp_path / "own"
