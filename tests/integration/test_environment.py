"""No process of the service writes to its environment once it has threads, whatever library does it.

A write while libpq reads it in another thread ends the process; see tests/architecture/test_environment.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import httpx2
import pytest

from api.http.security import create_key
from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from tests.support.api import post
from tests.support.faults import ApiProcess
from tests.support.service import ROOT, WorkerProcess

WATCH = """
import os, sys, threading
def look(event, given):
    if event in ("os.putenv", "os.unsetenv") and len(os.listdir("/proc/self/task")) > 1:
        with open({log!r}, "a") as log:
            print(sys.argv, given, threading.enumerate(), file=log)
sys.addaudithook(look)
with open({started!r}, "a") as log:
    print(sys.orig_argv, file=log)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Mapping[str, str]:
    """The variables that make every Python process watch itself."""
    folder = tmp_path / "watch"
    folder.mkdir()
    code = WATCH.format(log=str(tmp_path / "written"), started=str(tmp_path / "started"))
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_worker_and_api_write_nothing_to_the_environment_beside_threads(
    settings: Settings, sessions: Sessions, make_model: Callable[..., Path], wait_for: Callable[..., Job],
    start_worker: Callable[..., WorkerProcess], watched: Mapping[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    key = create_key(sessions, "k")
    worker = start_worker(more=watched)
    with ApiProcess(settings, tmp_path / "api.log", more=watched) as api:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=api.url, headers=headers, trust_env=False) as client:
            wait_for(post(client, make_model()), "succeeded")  # type: ignore[arg-type]
        api.stop()
    assert worker.drain() == 0
    started = (tmp_path / "started").read_text()
    assert "'worker'" in started and "'api'" in started
    written = tmp_path / "written"
    assert not written.exists(), written.read_text()
