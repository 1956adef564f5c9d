"""Artifacts on their way out, from the request to the commit: real workers and children, our stand-in of the Hub."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables import Job
from tests.hub_server import TOKEN, HubServer
from tests.integration.conftest import WorkerProcess, is_alive, wait_gone

LIMIT_S = 60.0
TARGET = {"repo_id": "org/tiny-int8", "hub_token": "team"}


@pytest.fixture(autouse=True)
def kept_token(client: TestClient, hub: HubServer) -> None:
    """The project's token. The service's own would be refused: it must not be used."""
    os.environ["HF_TOKEN"] = "hf_ofTheServiceItself"  # the fixture `hub` puts it back
    assert client.put("/v1/hub-tokens/team", json={"token": TOKEN}).status_code == 200


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"publish_urls": (f"file://{tmp_path}/out",)})


def body(model_dir: Path, **more: Any) -> dict[str, Any]:
    return {"model": {"path": str(model_dir)}, "config": {"preset": "fp8"}, **more}


@pytest.fixture
def publication(client: TestClient) -> Callable[..., dict[str, Any]]:
    """``publication(job_id, "published")``: what the job shows of it, once it is in one of the states."""

    def wait(job_id: str, *states: str, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            found: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()["publication"]
            if found and found["state"] in states:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    return wait


@pytest.fixture
def succeeded(
    client: TestClient, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
) -> str:  # fmt: skip
    """The id of a succeeded job; its worker is the first one."""
    job_id: str = client.post("/v1/jobs", json=body(make_model())).json()["id"]
    start_worker()
    wait_for(job_id, "succeeded")
    return job_id


def assert_is_there(client: TestClient, hub: HubServer, job_id: str, num_commits: int = 1) -> None:
    """One commit, whose files have the hashes of the artifact and of the MANIFEST.json beside them."""
    repository = hub.repositories["org/tiny-int8"]
    assert len(repository.history) == num_commits, [commit.message for commit in repository.history]
    files = repository.commits[repository.refs["main"]]
    listed = {entry["path"]: entry["sha256"] for entry in json.loads(files["MANIFEST.json"])["files"]}
    artifacts = client.get(f"/v1/jobs/{job_id}/artifacts").json()["data"]
    wanted = {file["path"]: file["sha256"] for file in artifacts if file["path"].lower() != "manifest.json"}
    assert listed == wanted and "model.safetensors" in wanted
    assert {name: hashlib.sha256(files[name]).hexdigest() for name in wanted} == wanted


def test_from_the_request_to_the_commit(
    client: TestClient, hub: HubServer, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job], publication: Callable[..., dict[str, Any]], sessions: Sessions, settings: Settings,
    tmp_path: Path,
) -> None:  # fmt: skip
    asked = body(make_model(), publish=TARGET | {"private": True, "commit_message": "int8"})
    planned = client.post("/v1/jobs?dry_run=true", json=asked).json()
    assert planned["publish"]["repo_id"] == "org/tiny-int8" and planned["publish"]["revision"] == "main"
    answer = client.post("/v1/jobs", json=asked)
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    assert (answer.json()["publication"], answer.json()["publish"]["private"]) == (None, True)
    start_worker()
    job = wait_for(job_id, "succeeded")
    done = publication(job_id, "published")
    repository = hub.repositories["org/tiny-int8"]
    [commit] = repository.history
    assert repository.private and commit.title == "int8"
    assert (done["revision"], done["url"]) == (commit.sha, f"{hub.url}/org/tiny-int8/commit/{commit.sha}")
    assert (done["attempt"], done["error"]) == (1, None)
    assert_is_there(client, hub, job_id)
    events = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    states = [event["data"]["state"] for event in events if event["kind"] == "publication_changed"]
    assert states == ["pending", "publishing", "published"]
    progress = [event["data"] for event in events if event["data"].get("unit") == "byte"]
    assert {data["phase"] for data in progress} == {"publish"}
    assert progress[-1]["done"] == progress[-1]["total"] > 19_000
    assert wait_for(job_id, "succeeded").version == job.version  # the job itself was not touched
    stream = client.get(f"/v1/jobs/{job_id}/events/stream").text
    assert '"state":"published"' in stream
    assert_no_secret_was_kept(sessions, settings, tmp_path)


def assert_no_secret_was_kept(sessions: Sessions, settings: Settings, tmp_path: Path) -> None:
    tables = ("job", "event", "attempt", "artifact", "outbox", "log_line", "audit_entry", "hub_token", "publication")
    with sessions.begin() as session:
        rows = [str(row) for table in tables for row in session.execute(text(f"SELECT to_jsonb(t) FROM {table} t"))]
    files = [path for path in (*settings.data_dir.rglob("*"), *tmp_path.glob("*.log")) if path.is_file()]
    assert [row for row in rows if "pub_" in row] and [path for path in files if path.suffix == ".log"]
    for secret in (TOKEN, "secret-signature", "hf_ofTheServiceItself"):
        assert not [row for row in rows if secret in row]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_a_job_that_succeeded_is_published_later_and_again(
    client: TestClient, hub: HubServer, succeeded: str, publication: Callable[..., dict[str, Any]]
) -> None:
    url = f"/v1/jobs/{succeeded}/publish"
    assert client.get(f"/v1/jobs/{succeeded}").json()["publication"] is None
    assert (client.post(url).status_code, client.post(url).json()["code"]) == (409, "nothing_to_retry")
    plan = client.post(f"{url}?dry_run=true", json=TARGET).json()
    assert (plan["exists"], plan["url"]) == (False, f"{hub.url}/org/tiny-int8")
    assert "model.safetensors" in {file["path"] for file in plan["files"]}
    assert hub.repositories == {}
    before = client.get(f"/v1/jobs/{succeeded}").headers["ETag"]
    answer = client.post(url, json=TARGET)
    assert (answer.status_code, answer.json()["publication"]["state"]) == (202, "pending"), answer.text
    assert answer.headers["ETag"] != before
    first = publication(succeeded, "published")
    assert client.post(f"{url}?dry_run=true", json=TARGET).json()["exists"] is True
    client.post(url, json=TARGET)
    second = publication(succeeded, "published")
    while second["id"] == first["id"]:
        second = publication(succeeded, "published")
    assert second["revision"] == first["revision"]
    assert_is_there(client, hub, succeeded)
    audit = client.get("/v1/audit").json()["data"]
    assert [entry["action"] for entry in audit].count("job.publish") == 2


# The steps of a push: (what is asked of the Hub, whether its answer is kept back when all is done).
STEPS = [
    ("GET /api/models/org/tiny-int8/revision", False),
    ("POST /api/repos/create", True),
    ("GET /api/models/org/tiny-int8/tree", False),
    ("/preupload/", True),
    ("lfs/objects/batch", True),
    ("PUT /cdn/lfs", False),
    ("PUT /cdn/lfs", True),
    ("lfs/verify", True),
    ("/commit/", False),
    ("/commit/", True),
    ("GET /api/models/org/tiny-int8/tree", False),
]


@pytest.mark.parametrize("who", ["child", "worker"])
@pytest.mark.parametrize(("step", "after"), STEPS, ids=[f"{step}-{after}" for step, after in STEPS])
def test_killed_at_a_step_it_is_taken_up_and_commits_once(
    client: TestClient, hub: HubServer, succeeded: str, publication: Callable[..., dict[str, Any]],
    start_worker: Callable[..., WorkerProcess], step: str, after: bool, who: str,
) -> None:  # fmt: skip
    with hub.faults.hold(step, after=after) as hold:
        client.post(f"/v1/jobs/{succeeded}/publish", json=TARGET)
        assert hold.reached.wait(LIMIT_S)
        [pid] = publishers()
        if who == "child":
            os.kill(pid, signal.SIGKILL)
        else:
            [worker] = workers_of(pid)
            os.kill(worker, signal.SIGKILL)
        wait_gone([pid])
    if who == "worker":
        start_worker()
    done = publication(succeeded, "published")
    assert done["attempt"] == 2
    assert_is_there(client, hub, succeeded)
    assert done["revision"] == hub.repositories["org/tiny-int8"].history[0].sha


def publishers() -> list[int]:
    """The processes that publish: children of keepers of the workers of this test."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command[1:4] == [b"-m", b"quantcore", b"publish"] and descends_from_us(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if is_alive(pid)]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descends_from_us(pid: int) -> bool:
    while pid > 1:
        pid = parent_of(pid)
        if pid == os.getpid():
            return True
    return False


def workers_of(publisher: int) -> list[int]:
    return [parent_of(parent_of(publisher))]
