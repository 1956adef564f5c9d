"""A hostile engine: what a process that a model took over finds of the machine and of the service (part A)."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from api.confinement import originals_of, reach_of
from api.settings import Settings
from quantcore.sandbox import landlock
from worker.engine import Engine, HubAccess
from worker.memory_watch import MemoryLimit

HOSTILE = """
import json, os, socket, sys
asked = json.load(open(sys.argv[-1]))["asked"]
found = {}
def attempt(name, action):
    try:
        found[name] = action() or "done"
    except OSError as error:
        found[name] = type(error).__name__
for path in asked["files"]:
    attempt(path, lambda: open(path, "rb").read(1) and None)
for path in asked["folders"]:
    attempt(path, lambda: os.listdir(path) and None)
for path in asked.get("written", ()):
    attempt(path, lambda: open(path, "w").close())
for path in asked["sockets"]:
    attempt(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
for port in asked["ports"]:
    attempt(f"port {port}", lambda: socket.create_connection(("127.0.0.1", port), timeout=5).close())
attempt("signal", lambda: os.kill(asked["worker"], 0))
for path in asked.get("changed", ()):
    attempt(f"truncate {path}", lambda: os.truncate(path, 0))
    attempt(f"open {path}", lambda: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)))
    attempt(f"chmod {path}", lambda: os.chmod(path, 0o777))
    attempt(f"chown {path}", lambda: os.chown(path, os.getuid(), os.getgid()))
    attempt(f"lchown {path}", lambda: os.lchown(path, os.getuid(), os.getgid()))
    attempt(f"setxattr {path}", lambda: os.setxattr(path, "user.a", b"1"))
    attempt(f"removexattr {path}", lambda: os.removexattr(path, "user.b"))
attempt("pair", lambda: socket.socketpair()[0].close())
attempt("own status", lambda: open("/proc/self/status").read(1) and None)
print(json.dumps({"kind": "found", "found": found}))
"""
REFUSED = {"PermissionError", "ProcessLookupError"}

NEWER = {"signal": landlock.SCOPE_ABI, "port": landlock.TCP_ABI}
"""What the kernel refuses since a version of Landlock alone (docs/concepts/confinement.md)."""

pytestmark = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock: nothing to see")


@pytest.fixture
def settings(tmp_path: Path, postgres_url: str, broker_url: str) -> Settings:
    for folder in ("data/work/job_1.1", "data/work/job_2.1", "data/artifacts/job_2/abc", "data/datasets", "models/m"):
        (tmp_path / folder).mkdir(parents=True)
    for secret in ("secret.key", "connection.json", "work/job_2.1/task.json", "datasets/b.jsonl"):
        (tmp_path / "data" / secret).write_text("secret")
    (tmp_path / "engine.py").write_text(HOSTILE)
    return Settings(
        database_url=postgres_url, broker_url=broker_url,
        data_dir=tmp_path / "data", model_roots=(tmp_path / "models",),
        secret_key_file=tmp_path / "data" / "secret.key", engine_command=f"{sys.executable} -S {tmp_path}/engine.py",
    )  # type: ignore[arg-type]  # fmt: skip


def socket_folder(url: str) -> str:
    """Return the path of the socket in a URL of the local stack."""
    return url.partition("host=")[2].partition("&")[0] or url.removeprefix("redis+socket://")


def run(settings: Settings, asked: dict[str, Any], model: Path, **options: Any) -> dict[str, str]:
    """Return what the hostile engine of a job with ``model`` could do."""
    task_file = settings.work_dir / "job_1.1" / "task.json"
    task_file.write_text(json.dumps({"model_dir": str(model), "calibration": {}, "evaluation": {}, "asked": asked}))
    engine = Engine(settings, task_file, limit=MemoryLimit(settings, None, "test"), project_id="prj_a", **options)
    lines = list(engine.lines())
    said = b"".join(engine.log_lines()).decode()
    assert engine.wait() == 0, said
    found: dict[str, str] = lines[0]["found"]
    return found


def everything(settings: Settings, *ports: int) -> dict[str, Any]:
    data, mine = settings.data_dir, os.getpid()
    database, broker = (each.get_secret_value() for each in (settings.database_url, settings.broker_url))
    folder = Path(socket_folder(database))
    return {
        "files": [
            *(str(data / name) for name in ("secret.key", "connection.json", "work/job_2.1/task.json")),
            str(settings.datasets_dir / "b.jsonl"), "/etc/shadow", "/etc/passwd", f"/proc/{mine}/environ",
            f"/proc/{mine}/cmdline", f"/proc/{mine}/root{data}/secret.key", "/proc/self/environ",
        ],
        "folders": [str(data), str(settings.work_dir), str(settings.artifacts_dir), "/proc", "/root", "/etc"],
        "sockets": [str(folder / ".s.PGSQL.5432") if folder.is_dir() else str(folder), socket_folder(broker)],
        "ports": list(ports), "worker": mine,
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"hub": HubAccess()}], ids=["offline", "with the Hub"])
def test_it_reaches_nothing_of_the_service(settings: Settings, options: dict[str, Any]) -> None:
    found = run(settings, everything(settings, 5432, 6379), settings.model_roots[0] / "m", **options)
    assert {found.pop("pair"), found.pop("own status")} == {"done"}
    done = {name: how for name, how in found.items() if how not in REFUSED}
    assert {name for name in done if landlock.abi() >= NEWER.get(name.split()[0], 0)} == set()


def test_it_changes_no_file_of_the_service_or_of_the_model(settings: Settings) -> None:
    """Landlock has no rights for a file's mode, owner and attributes, and one to truncate since Linux 6.2 alone."""
    model = settings.model_roots[0] / "m"
    files = [settings.data_dir / "secret.key", model / "model.safetensors"]
    files[1].write_text("weights")
    for file in files:
        with suppress(OSError):  # a file system in memory has no attributes before Linux 6.6
            os.setxattr(file, "user.b", b"1")
    before = [(file.read_bytes(), file.stat().st_mode, os.listxattr(file)) for file in files]
    found = run(settings, everything(settings) | {"changed": list(map(str, files))}, model)
    changes = [name for name in found if name.endswith(tuple(map(str, files))) and " " in name]
    assert len(changes) == 14
    assert {found[name] for name in changes if name.startswith(("truncate ", "open "))} == {"PermissionError"}
    assert [(file.read_bytes(), file.stat().st_mode, os.listxattr(file)) for file in files] == before


def test_it_writes_no_baseline_of_another_project(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever could would decide what another project's results are compared with."""
    monkeypatch.setenv("BITFOUNDRY_ORIGINALS_DIR", str(tmp_path / "originals"))
    mine, theirs = (originals_of(project) for project in ("prj_a", "prj_b"))
    assert mine is not None and theirs is not None
    theirs.mkdir(parents=True)
    (theirs / "known.json").write_text("1")
    written = [mine / "new.json", theirs / "new.json", theirs / "known.json", tmp_path / "originals" / "new.json"]
    asked = everything(settings) | {"written": [str(path) for path in written]}
    asked["files"].append(str(theirs / "known.json"))
    asked["folders"].append(str(theirs))
    found = run(settings, asked, settings.model_roots[0] / "m")
    assert found[str(mine / "new.json")] == "done"
    assert {found[str(path)] for path in (*written[1:], theirs)} == {"PermissionError"}


def test_processes_of_one_job_reach_each_other_and_not_the_database(settings: Settings) -> None:
    """The rules of several processes: any port but those of the service. They take effect as above."""
    settings = settings.model_copy(update={
        "database_url": type(settings.database_url)("postgresql+psycopg://user:word@db.example.org:6000/x"),
        "broker_url": type(settings.broker_url)("rediss://:word@cache.example.org/0"),
    })  # fmt: skip
    folder = settings.work_dir / "job_1.1"
    reach = reach_of(settings, folder, {}, with_hub=True, num_processes=2)
    assert reach.tcp == ((1, 5999), (6001, 6378), (6380, 65535)) and 1 not in reach.families
    alone = reach_of(settings, folder, {}, with_hub=False)
    assert alone.tcp == () and alone.families == ()


def test_a_folder_that_looks_like_a_snapshot_opens_nothing_else(settings: Settings) -> None:
    """Its ``blobs`` is a link to the data folder."""
    model = settings.model_roots[0] / "models--x" / "snapshots" / "y"
    model.mkdir(parents=True)
    (model.parents[1] / "blobs").symlink_to(settings.data_dir)
    found = run(settings, everything(settings), model)
    assert found[str(settings.data_dir / "secret.key")] in REFUSED
    reach = reach_of(settings, settings.work_dir / "job_1.1", {"model_dir": str(model)}, with_hub=False)
    assert {path for path, who in reach.files.items() if who is not None} == {model}
