"""Stored files against their rows: what is missing, damaged or nobody's is found, said and counted; rows stay."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.integrity import check, watch
from api.integrity.watch import Watch
from api.jobs.retention_task import ORPHAN_AGE_S
from api.settings import Settings
from api.store import manifest, migrate
from api.store.engine import Sessions
from api.store.queue import integrity, leases
from bitfoundry.local.stack import Postgres
from tests.support.service import ROOT, environment_of
from tests.support.waiting import wait_until

Submit = Callable[..., str]


@pytest.fixture
def make_artifact(sessions: Sessions, submit: Submit, settings: Settings) -> Callable[[], Path]:
    """``make_artifact()``: the folder of a job that has succeeded, with two files and their manifest."""

    def make() -> Path:
        submit()
        with sessions.begin() as session:
            lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        contents = {"model.safetensors": b"weights of " + lease.job_id.encode(), "config.json": b"{}"}
        files = [
            {"path": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        ]
        written = json.dumps({"format": 1, "files": files}).encode()
        sha256 = hashlib.sha256(written).hexdigest()
        folder = settings.artifacts_dir / lease.job_id / sha256
        folder.mkdir(parents=True)
        for name, content in (contents | {manifest.MANIFEST: written}).items():
            (folder / name).write_bytes(content)
        with sessions.begin() as session:
            leases.succeed(session, lease, manifest_sha256=sha256, path=str(folder), num_bytes=1, summary={})
        return folder

    return make


def make_dataset(client: TestClient, content: bytes) -> dict[str, Any]:
    answer = client.post("/v1/datasets", files={"file": ("a.jsonl", content)})
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def age(*paths: Path) -> None:
    then = time.time() - ORPHAN_AGE_S - 60
    for path in paths:
        os.utime(path, (then, then))


def age_rows(sessions: Sessions) -> None:
    with sessions.begin() as session:
        for table in ("artifact", "dataset"):
            session.execute(text(f"UPDATE {table} SET created_at = created_at - interval '8 days'"))


def fsck(settings: Settings, *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "api", "fsck", "--json", *flags]
    ended = subprocess.run(command, cwd=ROOT, env=environment_of(settings), capture_output=True, text=True)
    assert ended.stderr == "", ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def found_in(answer: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["kind"], each["path"]) for each in answer["findings"]}


@pytest.mark.slow
def test_what_is_wrong_is_said_and_only_files_of_nobody_go(
    client: TestClient, sessions: Sessions, settings: Settings, make_artifact: Callable[[], Path]
) -> None:
    good, changed, short, away, extra, headless = (make_artifact() for _ in range(6))
    datasets = [make_dataset(client, b'{"text": "row %d"}\n' % number) for number in range(3)]
    upload = client.post("/v1/uploads", json={"filename": "a.jsonl"}).json()["id"]
    sha256 = hashlib.sha256(b"part").hexdigest()
    for number in (1, 2):
        put = client.put(f"/v1/uploads/{upload}/parts/{number}", params={"sha256": sha256}, content=b"part")
        assert put.status_code == 200
    assert fsck(settings) == (0, {"num_checked": 9, "findings": [], "removed": []})

    (changed / "model.safetensors").write_bytes(b"x" * (changed / "model.safetensors").stat().st_size)
    (short / "config.json").unlink()
    shutil.rmtree(away)
    (extra / "new.py").write_text("print()")
    (headless / manifest.MANIFEST).write_bytes(b"{}")
    files = [settings.datasets_dir / f"{dataset['sha256']}.jsonl" for dataset in datasets]
    files[0].unlink()
    files[1].write_bytes(b"other")
    (settings.uploads_dir / upload / f"2.{sha256}").unlink()
    orphans = [
        settings.artifacts_dir / f"job_{'0' * 32}",
        good.with_name("0" * 64),
        settings.datasets_dir / f"{'0' * 64}.jsonl",
        settings.uploads_dir / "left.jsonl",
        settings.uploads_dir / f"upl_{'0' * 32}",
    ]
    young = settings.datasets_dir / f"{'1' * 64}.jsonl"
    kept = [settings.artifacts_dir / "lost+found", good.with_name(f"rejected-{'0' * 64}")]
    for path in (*orphans, young, *kept):
        path.write_bytes(b"") if path.suffix else path.mkdir()
    age(*orphans, *kept, files[2], good, good.parent)

    def below(path: Path) -> str:
        return str(path.relative_to(settings.data_dir))

    wrong = {
        ("damaged", below(changed / "model.safetensors")),
        ("missing", below(short / "config.json")),
        ("missing", below(away)),
        ("damaged", below(extra / "new.py")),
        ("damaged", below(headless / manifest.MANIFEST)),
        ("missing", below(files[0])),
        ("damaged", below(files[1])),
        ("missing", below(settings.uploads_dir / upload / f"2.{sha256}")),
    }
    nobodys = {("orphan", below(path)) for path in orphans}
    status, answer = fsck(settings)
    assert (status, found_in(answer)) == (1, wrong | nobodys) and answer["removed"] == []
    assert all(path.exists() for path in orphans)
    counts = {"damaged": 4, "missing": 4, "orphan": 5}
    assert client.get("/healthz/ready").json()["integrity"] == counts
    shown = client.get("/metrics").text
    assert all(f'bitfoundry_integrity_findings{{kind="{kind}"}} {number}.0' in shown for kind, number in counts.items())

    with sessions.begin() as session:
        rows = [session.scalar(text(f"SELECT count(*) FROM {table}")) for table in ("job", "artifact", "dataset")]
    status, answer = fsck(settings, "--repair")
    assert (status, found_in(answer)) == (1, wrong)
    assert set(answer["removed"]) == {path for _, path in nobodys}
    assert not any(path.exists() for path in orphans)
    assert young.exists() and all(path.exists() for path in kept) and files[2].exists() and good.exists()
    with sessions.begin() as session:
        after = [session.scalar(text(f"SELECT count(*) FROM {table}")) for table in ("job", "artifact", "dataset")]
    assert after == rows == [6, 6, 3]

    for folder in (changed, short, away, extra, headless):
        assert client.delete(f"/v1/jobs/{folder.parent.name}").status_code == 204
    for dataset in datasets[:2]:
        assert client.delete(f"/v1/datasets/{dataset['id']}").status_code == 204
    assert client.delete(f"/v1/uploads/{upload}").status_code == 204
    assert fsck(settings)[0] == 0, "nothing is said any more of what is gone"
    assert client.get("/healthz/ready").json()["integrity"] == {"damaged": 0, "missing": 0, "orphan": 0}


def test_the_service_checks_by_itself_what_was_not_looked_at_for_a_week(
    client: TestClient, sessions: Sessions, settings: Settings, make_artifact: Callable[[], Path]
) -> None:
    folder, dataset = make_artifact(), make_dataset(client, b'{"text": "a row"}\n')
    (folder / "config.json").write_bytes(b"[]")
    file = settings.datasets_dir / f"{dataset['sha256']}.jsonl"
    content = file.read_bytes()
    file.write_bytes(b"other")
    working = Watch(settings, sessions)
    assert not working.step(), "they are too new"
    age_rows(sessions)
    assert working.step() and working.step() and not working.step()
    with sessions.begin() as session:
        assert integrity.count(session) == {"damaged": 2, "missing": 0, "orphan": 0}
        session.execute(text("UPDATE dataset SET checked_at = checked_at - interval '8 days'"))
    file.write_bytes(content)
    assert working.step()
    with sessions.begin() as session:
        [left] = integrity.find_all(session)
    assert left.path.endswith("config.json")
    with sessions.begin() as session:
        session.execute(text("UPDATE artifact SET checked_at = checked_at - interval '8 days'"))
        thing = integrity.claim_due(session)
    assert thing is not None
    found = check.check(thing, settings, lambda num_bytes: None)
    assert client.delete(f"/v1/jobs/{folder.parent.name}").status_code == 204
    with sessions.begin() as session:
        assert integrity.record_check(session, thing, found) == [], "it was deleted while it was looked at"
        assert integrity.count(session)["damaged"] == 0


def test_it_is_slow_and_ends_at_once(
    client: TestClient, sessions: Sessions, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = make_dataset(client, b'{"text": "a row"}\n')["id"]
    age_rows(sessions)
    monkeypatch.setattr(watch, "BYTES_PER_S", 0.001)  # hours for a row
    claimed: list[str] = []
    claim = integrity.claim_due

    def note(session: Any) -> Any:
        thing = claim(session)
        claimed.append(thing.id)
        return thing

    monkeypatch.setattr(integrity, "claim_due", note)
    working = Watch(settings, sessions)
    working.start()
    wait_until(lambda: mine in claimed)  # perhaps after what other tests have left, whose files are gone
    working.stop()
    assert not working._thread.is_alive() and claimed[-1] == mine
    with sessions.begin() as session:
        assert integrity.count(session)["damaged"] == 0, "half a check says nothing"


@pytest.mark.slow
def test_the_command_for_the_service_of_up(tmp_path: Path) -> None:
    """While it runs and while it does not: the database is found, or started for the command."""
    home = tmp_path / "home"
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_URL")}

    def run() -> tuple[int, str]:
        command = [sys.executable, "-m", "bitfoundry", "fsck", "--home", str(home), "--json"]
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    assert "does not exist" in run()[1]
    server = Postgres(home)
    migrate.upgrade(server.start())
    try:
        status, said = run()
        assert (status, json.loads(said)["findings"]) == (0, []), said
    finally:
        server.stop()
    litter = home / "uploads" / "left.jsonl"
    litter.parent.mkdir()
    litter.write_bytes(b"")
    age(litter)
    status, said = run()
    assert (status, found_in(json.loads(said))) == (1, {("orphan", "uploads/left.jsonl")}), said
