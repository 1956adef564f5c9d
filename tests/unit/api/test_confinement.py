"""What an engine reaches: its job's files and the programs it is made of; never the data folder's secrets.

Where the kernel has no Landlock, the tests of it say so and hold the fallback to what it promises.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api import confinement
from api.confinement import reach_of
from api.settings import Settings
from quantcore.errors import ConfigError, ModelError
from quantcore.sandbox import landlock
from quantcore.sandbox.opening import open_named
from worker.engine import Engine
from worker.memory_watch import MemoryLimit

HAS_LANDLOCK = landlock.abi() > 0

TRY = """
import json, os, sys
found = {}
for path in json.loads(open(os.environ["HOME_OF_TEST"] + "/asked.json").read()):
    try:
        with open(path, "rb") as file:
            file.read(1)
        found[path] = "read"
    except OSError as error:
        found[path] = type(error).__name__
for path in (sys.argv[1] + ".new", os.environ["TMPDIR"] + "/scratch"):
    open(path, "w").write("x")
    os.replace(path, path + ".moved")
try:
    open(os.environ["HOME_OF_TEST"] + "/models/m/config.json", "a")
    found["model"] = "written"
except OSError as error:
    found["model"] = type(error).__name__
print(json.dumps({"kind": "found", "found": found, "reads": os.environ["BITFOUNDRY_READS"]}))
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A data folder inside the folder of models, as the local stack has it below the home."""
    data = tmp_path / "data"
    attempt = data / "work" / "job_1.1"
    for folder in (attempt, data / "artifacts" / "job_2", data / "datasets", tmp_path / "models" / "m"):
        folder.mkdir(parents=True)
    for secret in (
        "secret.key",
        "connection.json",
        "artifacts/job_2/report.json",
        "datasets/a.jsonl",
        "datasets/b.txt",
    ):
        (data / secret).write_text("secret")
    (tmp_path / "models" / "m" / "config.json").write_text("{}")
    (tmp_path / "models" / "key").write_text("secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_TEST", "1")
    script = tmp_path / "engine.py"
    script.write_text(TRY)
    return Settings(
        database_url="x", broker_url="x", data_dir=data, engine_command=f"{sys.executable} -S {script}",
        secret_key_file=tmp_path / "models" / "key", model_roots=(tmp_path,),
    )  # type: ignore[arg-type]  # fmt: skip


def task_of(settings: Settings, tmp_path: Path, model: Path | None = None) -> dict[str, Any]:
    text = str(settings.datasets_dir / "a.jsonl")
    return {"model_dir": str(model or tmp_path / "models" / "m"), "calibration": {"source": text}, "evaluation": {}}


def run(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path | None = None) -> Any:
    """What the engine of a job could open, by path."""
    asked = [tmp_path / "models/m/config.json", tmp_path / "models/key", tmp_path / "elsewhere",
             Path("/etc/passwd"), Path("/etc/shadow"), Path("/etc/hosts"), Path(f"/proc/{os.getpid()}/cmdline"),
             Path(f"/proc/{os.getpid()}/environ"), Path("/proc/self/status"), settings.data_dir / "secret.key",
             *(settings.data_dir / name for name in ("connection.json", "artifacts/job_2/report.json")),
             *(settings.datasets_dir / name for name in ("a.jsonl", "b.txt"))]  # fmt: skip
    (tmp_path / "elsewhere").write_text("a person's own")
    task_file = settings.work_dir / "job_1.1" / "task.json"
    task_file.write_text(json.dumps(task_of(settings, tmp_path, model)))
    home = task_file.parent / "home"
    home.mkdir()
    (home / "asked.json").write_text(json.dumps([str(path) for path in asked]))
    (home / "models").symlink_to(tmp_path / "models")
    monkeypatch.setenv("LC_TEST", "kept")
    monkeypatch.setattr("worker.engine.KEPT_VARIABLES", ("PATH", "HOME_OF_TEST"))
    monkeypatch.setenv("HOME_OF_TEST", str(home))
    engine = Engine(settings, task_file, limit=MemoryLimit(settings, None, "test"), project_id="prj_a")
    lines = list(engine.lines())
    said = b"".join(engine.log_lines()).decode()
    assert engine.wait() == 0, said
    return {path.removeprefix(f"{tmp_path}/"): how for path, how in lines[0]["found"].items()}


def test_an_engine_cannot_read_the_secrets(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(settings, tmp_path, monkeypatch)
    mine = {"models/m/config.json", "/etc/hosts", "/proc/self/status", "data/datasets/a.jsonl"}
    others = set(found) - mine - {"model"}
    assert {found[path] for path in mine} == {"read"}
    if HAS_LANDLOCK:
        assert {found[path] for path in others} == {"PermissionError"}, str(found)
        assert found["model"] == "PermissionError"
    else:  # this kernel has none: user and group alone decide
        assert landlock.abi() == 0 and {found[path] for path in others} <= {"read", "PermissionError"}


def test_every_source_of_the_text_can_be_read(settings: Settings, tmp_path: Path) -> None:
    files = [settings.datasets_dir / name for name in ("a.jsonl", "b.txt")]
    sources = [{"source": str(file)} for file in files] + [{"source": "builtin"}]
    task = task_of(settings, tmp_path) | {"calibration": {"sources": sources}}
    assert set(files) <= reach_of(settings, settings.work_dir / "job_1.1", task, with_hub=False).files.keys()


def test_an_importance_matrix_can_be_read(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "models" / "im.gguf"
    file.touch()
    config = {"algo_config": [{"name": "rtn", "imatrix": str(file)}]}
    task = task_of(settings, tmp_path) | {"config": config}
    assert file in reach_of(settings, settings.work_dir / "job_1.1", task, with_hub=False).files


def test_what_a_snapshot_and_a_gguf_file_need(settings: Settings, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--a--b"
    snapshot = cache / "snapshots" / "abc"
    for folder in (snapshot, cache / "blobs"):
        folder.mkdir(parents=True)
    folder = settings.work_dir / "job_1.1"
    reach = reach_of(settings, folder, task_of(settings, tmp_path, snapshot), with_hub=False)
    assert {snapshot, cache / "blobs"} <= reach.files.keys() and tmp_path / "hub" not in reach.files
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for name in ("a.gguf", "b.gguf", "tokenizer.json", "diary.txt"):
        (shelf / name).write_text("x")
    reach = reach_of(settings, folder, task_of(settings, tmp_path, shelf / "a.gguf"), with_hub=False)
    assert {path.name for path in reach.files if path.parent == shelf} == {"a.gguf", "tokenizer.json"}
    parts = [f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in (*parts, "big-00001-of-00003.gguf"):
        (shelf / name).touch()
    reach = reach_of(settings, folder, task_of(settings, tmp_path, shelf / parts[0]), with_hub=False)
    assert {path.name for path in reach.files if path.parent == shelf} == {*parts, "tokenizer.json"}


def test_the_hubs_token_is_out_of_reach(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    reach = reach_of(settings, settings.work_dir / "job_1.1", {}, with_hub=True)
    assert tmp_path / "hf" / "hub" in reach.written and tmp_path / "hf" not in (*reach.written, *reach.read)
    assert reach.environment()["HF_TOKEN_PATH"] == os.devnull
    offline = reach_of(settings, settings.work_dir / "job_1.1", {}, with_hub=False)
    assert not any(path.is_relative_to(tmp_path / "hf") for path in (*offline.written, *offline.read))


def test_without_landlock_the_engine_holds_itself_to_its_files(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    reach = reach_of(settings, settings.work_dir / "job_1.1", task_of(settings, tmp_path), with_hub=False)
    assert reach.command(["engine"]) == ["engine"]
    monkeypatch.setenv("BITFOUNDRY_READS", reach.environment()["BITFOUNDRY_READS"])
    with open_named(tmp_path / "models" / "m" / "config.json") as file:
        assert file.read() == b"{}"
    (tmp_path / "models" / "m" / "link.json").symlink_to(settings.data_dir / "secret.key")
    for path in (settings.data_dir / "secret.key", tmp_path / "models" / "m" / "link.json"):
        with pytest.raises(ModelError, match="not one of the files") as caught:
            open_named(path)
        assert caught.value.code == "unsafe_path"


def test_the_worker_says_which_protection_it_has(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(landlock, "abi", lambda: 0)
        confinement.tell(settings)
        monkeypatch.setattr(landlock, "abi", lambda: 7)
        confinement.tell(settings)
        confinement.tell(settings.model_copy(update={"confine_engine": False}))
    said = [record.message for record in caplog.records]
    assert "no Landlock" in said[0] and "ABI 7" in said[1] and "turned off" in said[2]


def test_nothing_starts_without_the_protection_that_is_required(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = settings.model_copy(update={"confine_engine": "required"})
    monkeypatch.setattr(landlock, "abi", lambda: 7)
    confinement.tell(required)
    assert confinement.describe(required) == "landlock 7"
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    assert confinement.describe(required) == "none"
    with pytest.raises(ConfigError, match="no Landlock"):
        confinement.tell(required)


def test_it_fails_closed(tmp_path: Path) -> None:
    """Rules that cannot be understood start nothing."""
    rules = tmp_path / "rules.json"
    rules.write_text('{"everything": ["/"]}')
    command = [sys.executable, "-I", "-S", landlock.__file__, str(rules), "/bin/echo", "started"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0 and "started" not in ended.stdout


def test_the_copy_of_a_models_store_is_read_by_its_own_job_and_written_by_none(
    settings: Settings, tmp_path: Path
) -> None:
    """A process with the store's keys writes there, also for the next attempt."""
    attempt = settings.work_dir / "job_1.3"
    attempt.mkdir(parents=True)
    for job_id in ("job_1", "job_2"):
        (settings.copy_dir(job_id) / "tiny").mkdir(parents=True)
    own = settings.copy_dir("job_1") / "tiny"
    reach = reach_of(settings, attempt, task_of(settings, tmp_path, own), with_hub=False)
    assert reach.files[own] is not None and reach.files[attempt] is None
    assert not [path for path in reach.written if own.is_relative_to(path) or path.is_relative_to(own.parent)]
    with pytest.raises(ModelError) as refused:
        reach_of(settings, attempt, task_of(settings, tmp_path, settings.copy_dir("job_2") / "tiny"), with_hub=False)
    assert refused.value.code == "path_not_allowed"
