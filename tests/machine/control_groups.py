"""What a worker's control groups do on a kernel that has them. Run by ``python -m tests.machine``, in a container."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.settings import Settings
from api.store.tables.jobs import Job
from tests.support.service import WorkerProcess
from tests.support.waiting import wait_until
from worker import cgroup

MB = 1 << 20
JOIN = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
EAT = JOIN + "taken = []\nwhile True: taken.append(b'x' * (16 << 20))"
STAY = (
    JOIN
    + """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
"""
)


@pytest.fixture
def parent() -> Iterator[Path]:
    cgroup.prepare.cache_clear()
    found = cgroup.prepare()
    assert found is not None and cgroup.describe() == "cgroup"
    yield found


def start(code: str, group: cgroup.MemoryGroup) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, str(group.procs)], stdout=subprocess.PIPE, text=True)


def test_the_kernel_ends_whoever_takes_more(parent: Path) -> None:
    group = cgroup.make("eats", 200 * MB)
    assert group is not None
    with start(EAT, group) as process:
        assert process.wait() == -9
    assert group.was_exceeded() and 190 * MB < group.reached_bytes() <= 200 * MB
    group.remove()
    assert not list(parent.glob("bitfoundry-*"))


def test_a_process_that_left_its_session_ends_with_the_group(parent: Path) -> None:
    group = cgroup.make("stays", 200 * MB)
    assert group is not None
    with start(STAY, group) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    os.kill(pid, 0)
    group.remove()
    assert not list(parent.glob("bitfoundry-*"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not group.was_exceeded()


def test_groups_of_a_worker_that_was_killed_are_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(cgroup.make(name, 200 * MB) for name in ("left", "young"))
    monkeypatch.setattr(cgroup, "YOUNG_S", 1)
    time.sleep(1.5)
    assert cgroup.make("new", 200 * MB)
    cgroup.prepare.cache_clear()
    cgroup.prepare()
    assert {folder.name for folder in parent.glob("bitfoundry-*")} == {"bitfoundry-new"}


def test_a_unit_that_systemd_delegates(parent: Path) -> None:
    """A process in it makes its groups there, and only if the unit is marked so."""
    unit = parent / "unit.service"
    unit.mkdir()
    code = JOIN + "from worker import cgroup; print(cgroup.prepare())"
    seen = []
    for mark in (b"0", b"1"):
        os.setxattr(unit, "user.delegate", mark)
        done = subprocess.run(
            [sys.executable, "-c", code, str(unit / "cgroup.procs")], capture_output=True, text=True, check=True
        )
        seen.append(done.stdout.strip())
    assert seen == ["None", str(unit)]


def test_a_job_that_takes_more_than_its_limit(
    settings: Settings, make_model: Callable[..., Path], submit: Callable[..., str],
    start_worker: Callable[..., WorkerProcess], get_job: Callable[..., Job], parent: Path,
) -> None:  # fmt: skip
    start_worker(settings.model_copy(update={"memory_bytes": 300 * MB}))
    job = submit(make_model("hostile", mode="eats"), needs_memory_bytes=64 * MB)
    wait_until(lambda: get_job(job).state == "failed", timeout_s=500)
    ended = get_job(job)
    assert ended.error is not None and ended.error["code"] == "memory_limit", ended.error
    assert "the limit is 300 MiB" in ended.error["message"]
    assert not list(parent.glob(f"bitfoundry-{job}*"))
