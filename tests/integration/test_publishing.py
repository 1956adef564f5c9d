"""Artifacts on their way out, from the request to the commit: real workers and children, our stand-in of the Hub."""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api.settings import Settings
from api.store.engine import Sessions
from api.store.tables.jobs import Job
from bitfoundry.commands import main as cli
from quantcore.hub.pull import pull
from tests.support.hub_server import TOKEN, HubServer
from tests.support.models import tiny_model
from tests.support.params import with_usual
from tests.support.service import REAL_ENGINE, Server, WorkerProcess, is_alive, wait_gone
from tests.support.waiting import wait_until

LIMIT_S = 540.0
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
        def publication() -> Any:
            return client.get(f"/v1/jobs/{job_id}").json()["publication"]

        def in_one_of_them() -> Any:
            shown = publication()
            return shown if shown and shown["state"] in states else None

        return wait_until(in_one_of_them, timeout_s=timeout_s, note=publication)  # type: ignore[no-any-return]

    return wait


@pytest.fixture
def succeeded(
    client: TestClient, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job],
) -> str:  # fmt: skip
    """The id of a succeeded job; its worker is the first one."""
    job_id: str = client.post("/v1/jobs", json=body(make_model())).json()["id"]
    start_worker()
    wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
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
    with hub.faults.hold("/preupload/") as hold:
        assert hold.reached.wait(LIMIT_S)
        [pid] = publishers()
        for path in (f"/proc/{each}/{name}" for each in (pid, parent_of(pid)) for name in ("environ", "cmdline")):
            assert b"hf_" not in Path(path).read_bytes(), path
    job = wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
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


@pytest.mark.slow
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


# The steps of a push: (what is asked of the Hub, whether its answer is kept back when all is done, how many before).
TREE = "GET /api/models/org/tiny-int8/tree"
STEPS = {
    "before anything": ("GET /api/models/org/tiny-int8/revision", False, 0),
    "the repository is made": ("POST /api/repos/create", True, 0),
    "its files are looked at": (TREE, False, 0),
    "it was said what is large": ("/preupload/", True, 0),
    "the ways in are known": ("lfs/objects/batch", True, 0),
    "a file is under way": ("PUT /cdn/lfs", False, 0),
    "the file is there": ("PUT /cdn/lfs", True, 0),
    "the file is checked": ("lfs/verify", True, 0),
    "before the commit": ("/commit/", False, 0),
    "the commit is made": ("/commit/", True, 0),
    "the commit is looked at": (TREE, False, 1),
}
KILLS = [(step, who) for step in STEPS for who in ("child", "worker")]


@pytest.mark.short_leases
@pytest.mark.parametrize(("step", "who"), with_usual(KILLS, [("a file is under way", "child")]))
def test_killed_at_a_step_it_is_taken_up_and_commits_once(
    client: TestClient, hub: HubServer, succeeded: str, publication: Callable[..., dict[str, Any]],
    start_worker: Callable[..., WorkerProcess], step: str, who: str,
) -> None:  # fmt: skip
    part, after, skip = STEPS[step]
    with hub.faults.hold(part, after=after, skip=skip) as hold:
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


@pytest.mark.slow
@pytest.mark.short_leases
def test_a_worker_that_sleeps_through_its_lease_adds_nothing(
    client: TestClient, hub: HubServer, make_model: Callable[..., Path], publication: Callable[..., dict[str, Any]],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job], sessions: Sessions,
) -> None:  # fmt: skip
    """Its child is about to commit; another worker publishes meanwhile; then both wake up."""
    job_id = client.post("/v1/jobs", json=body(make_model())).json()["id"]
    sleeper = start_worker()
    wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    with hub.faults.hold("/commit/") as hold:
        client.post(f"/v1/jobs/{job_id}/publish", json=TARGET)
        assert hold.reached.wait(LIMIT_S)
        [pid] = publishers()
        sleeper.suspend(sessions)
        start_worker()
        done = publication(job_id, "published")
    sleeper.process.send_signal(signal.SIGCONT)
    wait_gone([pid])
    assert done["attempt"] == 2
    assert publication(job_id, "published") == done
    assert_is_there(client, hub, job_id)


@pytest.mark.slow
def test_a_drained_worker_gives_it_back(
    client: TestClient, hub: HubServer, make_model: Callable[..., Path], publication: Callable[..., dict[str, Any]],
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    job_id = client.post("/v1/jobs", json=body(make_model())).json()["id"]
    worker = start_worker()
    wait_for(job_id, "succeeded", timeout_s=LIMIT_S)
    with hub.faults.hold("PUT /cdn/lfs") as hold:
        client.post(f"/v1/jobs/{job_id}/publish", json=TARGET)
        assert hold.reached.wait(LIMIT_S)
        assert worker.drain() == 0
    given_back = publication(job_id, "pending")
    assert (given_back["error"], given_back["attempt"]) == (None, 1)
    start_worker()
    publication(job_id, "published")
    assert_is_there(client, hub, job_id)


@pytest.mark.slow
def test_a_push_that_fails_takes_nothing_away(
    client: TestClient, hub: HubServer, succeeded: str, publication: Callable[..., dict[str, Any]]
) -> None:
    url = f"/v1/jobs/{succeeded}"
    before = client.get(url).json()
    hub.faults.answers.append(("/commit/", 403, "no rights"))
    client.post(f"{url}/publish", json=TARGET)
    failed = publication(succeeded, "failed")
    assert (failed["error"]["code"], failed["error"]["retryable"]) == ("hub_forbidden", False)
    assert "create_pr" in failed["error"]["hint"] and failed["finished_at"]
    after = client.get(url).json()
    assert after | {"publication": None} == before
    assert client.get(f"{url}/artifacts/model.safetensors").status_code == 200
    hub.faults.answers.append(("/commit/", 503, ""))  # passes: tried again by itself
    again = client.post(f"{url}/publish")
    assert (again.status_code, again.json()["publication"]["id"]) == (202, failed["id"])
    assert client.post(f"{url}/publish", json=TARGET).json()["code"] == "publication_in_progress"
    done = publication(succeeded, "published")
    assert (done["id"], done["attempt"], done["error"]) == (failed["id"], 3, None)
    assert_is_there(client, hub, succeeded)
    events = client.get(f"{url}/events?kind=publication_changed").json()["data"]
    states = [(event["data"]["state"], (event["data"].get("error") or {}).get("code")) for event in events]
    assert states == [
        ("pending", None), ("publishing", None), ("failed", "hub_forbidden"),
        ("pending", None), ("publishing", None), ("pending", "hub_unreachable"),
        ("publishing", None), ("published", None),
    ]  # fmt: skip


@pytest.mark.slow
def test_what_goes_wrong_before_a_child_starts(
    client: TestClient, hub: HubServer, succeeded: str, publication: Callable[..., dict[str, Any]], sessions: Sessions,
    settings: Settings,
) -> None:  # fmt: skip
    """A token that was deleted, an artifact that was damaged since."""
    url = f"/v1/jobs/{succeeded}"
    client.post(f"{url}/publish", json=TARGET)
    publication(succeeded, "published")
    with sessions.begin() as session:
        session.execute(text("UPDATE publication SET state = 'failed', error = '{\"code\": \"x\"}'"))
    assert client.delete("/v1/hub-tokens/team").status_code == 204
    client.post(f"{url}/publish")
    assert publication(succeeded, "failed")["error"]["code"] == "hub_token_not_found"
    client.put("/v1/hub-tokens/team", json={"token": TOKEN})
    [weights] = settings.artifacts_dir.rglob("model.safetensors")
    weights.write_bytes(b"X" + weights.read_bytes()[1:])
    client.post(f"{url}/publish")
    wait_until(lambda: publication(succeeded, "failed")["error"]["code"] != "hub_token_not_found")
    assert publication(succeeded, "failed")["error"]["code"] == "artifact_corrupt"


@pytest.mark.slow
def test_to_a_folder_that_the_operator_allows(
    client: TestClient, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess], tmp_path: Path,
    publication: Callable[..., dict[str, Any]], hub: HubServer,
) -> None:  # fmt: skip
    """A link that leads out of it is followed first."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to(tmp_path)
    model_dir = make_model()
    for to in (f"file://{tmp_path}/elsewhere", f"file://{tmp_path}/out/link/x", f"file://{tmp_path}/outside",
               "s3://bucket/x"):  # fmt: skip
        answer = client.post("/v1/jobs", json=body(model_dir, publish={"to": to}))
        assert (answer.status_code, answer.json()["code"]) == (422, "target_not_allowed"), answer.text
        assert answer.json()["errors"][0]["pointer"] == "#/publish/to"
    unknown = client.post("/v1/jobs", json=body(model_dir, publish={"to": "memory://out/x"}))
    assert (unknown.status_code, unknown.json()["code"]) == (422, "invalid_publish"), "no store has this scheme"
    to = f"file://{tmp_path}/out/tiny"
    job_id = client.post("/v1/jobs", json=body(model_dir, publish={"to": to})).json()["id"]
    start_worker()
    done = publication(job_id, "published")
    manifest = (tmp_path / "out/tiny/MANIFEST.json").read_bytes()
    assert (done["url"], done["revision"]) == (to, hashlib.sha256(manifest).hexdigest())
    for entry in json.loads(manifest)["files"]:
        assert hashlib.sha256((tmp_path / "out/tiny" / entry["path"]).read_bytes()).hexdigest() == entry["sha256"]
    assert not hub.asked("/api/", "POST")


def test_what_cannot_be_is_said_at_once(client: TestClient, hub: HubServer, make_model: Callable[..., Path]) -> None:
    model_dir = make_model()
    for publish, code, pointer in (
        ({"repo_id": "../x", "hub_token": "team"}, "invalid_repo_id", "#/publish"),
        ({"repo_id": "org/x", "hub_token": TOKEN}, "invalid_request", "#/publish/hub_token"),
        ({"repo_id": "org/x", "hub_token": "none"}, "hub_token_not_found", "#/publish/hub_token"),
        ({"repo_id": "org/x"}, "hub_token_required", "#/publish/hub_token"),
        ({"repo_id": "others/x", "hub_token": "team"}, "hub_forbidden", "#/publish/hub_token"),
        ({"repo_id": "org/x", "to": "file:///x"}, "invalid_publish", "#/publish"),
        ({"repo_id": "org/x", "endpoint": "http://evil"}, "unknown_field", "#/publish/endpoint"),
        ({}, "invalid_publish", "#/publish"),
    ):
        answer = client.post("/v1/jobs", json=body(model_dir, publish=publish))
        assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
        assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
        assert TOKEN not in answer.text
    hub.role = "read"
    answer = client.post("/v1/jobs", json=body(model_dir, publish=TARGET))
    assert (answer.status_code, answer.json()["code"]) == (422, "hub_forbidden") and "reads only" in answer.text
    hub.role = "write"
    client.put("/v1/hub-tokens/old", json={"token": "hf_expiredExpired"})
    answer = client.post("/v1/jobs", json=body(model_dir, publish=TARGET | {"hub_token": "old"}))
    assert (answer.status_code, answer.json()["code"]) == (422, "hub_auth")
    hub.status = 503
    answer = client.post("/v1/jobs", json=body(model_dir, publish=TARGET))
    assert (answer.status_code, answer.json()["code"]) == (503, "hub_unreachable")
    hub.status = None
    assert client.get("/v1/jobs").json()["data"] == []
    sweep = {"job": body(model_dir, publish=TARGET), "matrix": {"/priority": [1, 2]}}
    answer = client.post("/v1/sweeps", json=sweep)
    assert (answer.status_code, answer.json()["code"]) == (422, "publish_collision"), answer.text
    sweep["matrix"] = {"/publish/revision": ["one", "two"]}
    assert client.post("/v1/sweeps", json=sweep).status_code == 202
    job_id = client.post("/v1/jobs", json=body(model_dir, publish=TARGET)).json()["id"]
    assert client.post(f"/v1/jobs/{job_id}/clone").json()["publish"] is None
    assert client.post(f"/v1/jobs/{job_id}/clone", json={"publish": TARGET}).json()["publish"]["hub_token"] == "team"
    for asked in ("", "?dry_run=true"):
        answer = client.post(f"/v1/jobs/{job_id}/publish{asked}", json=TARGET)
        assert (answer.status_code, answer.json()["code"]) == (409, "not_ready")
    assert client.post(f"/v1/jobs/job_{'0' * 32}/publish", json=TARGET).json()["code"] == "job_not_found"


@pytest.mark.slow
def test_the_commands(
    server: Server, hub: HubServer, succeeded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, publication: Callable[..., dict[str, Any]],
) -> None:  # fmt: skip
    monkeypatch.setenv("BITFOUNDRY_URL", server.url)
    monkeypatch.setenv("BITFOUNDRY_API_KEY", server.key)
    to_hub = ["push", succeeded, "--repo", "org/tiny-int8", "--hub-token", "team"]
    assert cli.run([*to_hub, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exists"] is False
    hub.faults.answers.append(("/commit/", 403, "no rights"))
    assert cli.run(to_hub) == 1
    assert "hub_forbidden" in capsys.readouterr().out
    assert cli.run(["show", succeeded]) == 0
    assert "failed to org/tiny-int8 (main)" in capsys.readouterr().out
    assert cli.run(["push", succeeded, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["publication"]["state"] == "published"
    with server.connect() as client:
        assert_is_there(client, hub, succeeded)
    for wrong, code in (
        (["push", succeeded], "nothing_to_retry"),
        (["push", succeeded, "--private"], "bitfoundry_error"),
        (["push", succeeded, "--to", "s3://bucket/x"], "target_not_allowed"),
        (["pull", succeeded, "--revision", "v1", "--output_dir", str(tmp_path / "x")], "bitfoundry_error"),
    ):
        assert cli.run([*wrong, "--json"]) == 1
        assert json.loads(capsys.readouterr().err)["error"]["code"] == code, wrong
    for name in (succeeded, "last"):
        assert cli.run(["pull", name, "--output_dir", str(tmp_path / "x"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["num_files"] == 3


@pytest.fixture
def real_engine(settings: Settings) -> Settings:
    return settings.model_copy(update=REAL_ENGINE)


@pytest.mark.slow
def test_a_real_model_there_and_back(
    client: TestClient, hub: HubServer, real_engine: Settings, start_worker: Callable[..., WorkerProcess],
    publication: Callable[..., dict[str, Any]], wait_for: Callable[..., Job], tmp_path: Path,
) -> None:  # fmt: skip
    """Quantized by the engine, published, pulled: the folder that comes back is the artifact, byte for byte."""
    folder = tiny_model(real_engine.model_roots[0] / "tiny")
    target = TARGET | {"force": True}  # whatever the verdict on random weights is
    asked = body(folder, publish=target, calibration={"source": "builtin", "num_samples": 2, "seq_len": 32})
    job_id = client.post("/v1/jobs", json=asked).json()["id"]
    start_worker(real_engine)
    job = wait_for(job_id, "succeeded", "failed", timeout_s=120)
    assert job.state == "succeeded", job.error
    done = publication(job_id, "published", "failed")
    assert done["state"] == "published", done
    assert_is_there(client, hub, job_id)
    os.environ["HF_TOKEN"] = TOKEN
    pull("org/tiny-int8", "main", tmp_path / "back", lambda event: None)
    [artifact] = (real_engine.artifacts_dir / job_id).iterdir()
    for path in (path for path in artifact.rglob("*") if path.is_file()):
        name = path.relative_to(artifact)
        assert name.name.lower() == "manifest.json" or (tmp_path / "back" / name).read_bytes() == path.read_bytes()


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
