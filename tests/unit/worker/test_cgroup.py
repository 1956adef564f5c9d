"""Which control groups a worker takes for its own. A STAND-IN for the kernel: folders with the files of groups."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker import cgroup


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all groups, in which this process is in ``/unit``."""
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    (tmp_path / "cgroup").mkdir()
    cgroup.prepare.cache_clear()
    yield tmp_path / "cgroup"
    cgroup.prepare.cache_clear()


def enter(mount: Path, path: str, controllers: str = "cpu memory pids") -> Path:
    """Put this process into a group of the path."""
    folder = mount / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "cgroup.controllers": controllers,
        "cgroup.subtree_control": "",
        "cgroup.procs": "11\n",
    }.items():
        (folder / name).write_text(content)
    (mount.parent / "own").write_text(f"4:memory:/elsewhere\n0::{path}\n")
    return folder


def test_a_unit_that_systemd_delegates(mount: Path) -> None:
    """Its processes move into a leaf: a group with groups below it holds none."""
    unit = enter(mount, "/system.slice/bitfoundry.service")
    assert (cgroup.prepare(), cgroup.describe()) == (None, "watched")
    cgroup.prepare.cache_clear()
    os.setxattr(unit, "user.delegate", b"1")
    assert (cgroup.prepare(), cgroup.describe()) == (unit, "cgroup")
    assert (unit / "cgroup.subtree_control").read_text() == "+memory"
    assert (unit / cgroup.LEAF / "cgroup.procs").read_text() == "11"
    enter(mount, "/system.slice/bitfoundry.service/bitfoundry")  # where a worker that starts later finds itself
    (unit / "cgroup.subtree_control").write_text("memory")
    cgroup.prepare.cache_clear()
    assert cgroup.prepare() == unit


def test_a_container_and_not_the_root_of_the_machine(mount: Path) -> None:
    root = enter(mount, "/")
    assert cgroup.prepare() is None
    (root / "cgroup.type").write_text("domain")  # only the root of the machine has no type
    cgroup.prepare.cache_clear()
    assert cgroup.prepare() == root


def test_a_group_without_the_memory_controller(mount: Path) -> None:
    (enter(mount, "/", controllers="hugetlb") / "cgroup.type").write_text("domain")
    assert cgroup.prepare() is None


def test_no_control_groups_at_all(mount: Path) -> None:
    assert cgroup.prepare() is None and cgroup.make("x", 1) is None
