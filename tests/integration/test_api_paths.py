"""Paths in requests: what no system can follow, what lies in the data folder, what is another project's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.http.security import create_key
from api.main import create_app
from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue.jobs import owns_artifact
from api.store.tables.jobs import Artifact, Job
from bitfoundry.local.stack import LocalStack
from tests.support.api import body

MakeModel = Callable[..., Path]

PATHS = {
    "a link loop": "{root}/loop",
    "inside a link loop": "{root}/loop/x.jsonl",
    "a name of 256 characters": "{root}/" + "n" * 256,
    "the root of another process": "/proc/1/root",
    "in the root of another process": "/proc/1/root/etc/passwd",
    "an open file": "/proc/self/fd/0",
    "the memory": "/proc/self/mem",
    "the environment": "/proc/self/environ",
    "a device": "/dev/zero",
    "half a surrogate pair": "{root}/\udc80",
}  # fmt: skip


@pytest.fixture
def root(settings: Settings) -> Path:
    root = settings.model_roots[0]
    root.mkdir(exist_ok=True)
    (root / "loop").symlink_to(root / "loop")
    return root


def asked_with(path: str, model: Path) -> dict[str, dict[str, Any]]:
    """By field: a job that names ``path`` there."""
    return {
        "/model/path": body(model, model={"path": path}),
        "/calibration/source": body(model, config={"preset": "int8_static"}, calibration={"source": path}),
        "/evaluation/source": body(model, evaluation={"source": path}),
    }


def test_a_path_that_cannot_be_followed_is_the_clients_fault(
    subtests: pytest.Subtests, client: TestClient, make_model: MakeModel, root: Path
) -> None:
    model = make_model()
    for case in PATHS:
        with subtests.test(case):
            path = PATHS[case].format(root=root)
            for field, asked in asked_with(path, model).items():
                for url in ("/v1/jobs", "/v1/jobs?dry_run=true"):
                    content = json.dumps(asked).encode()
                    answer = client.post(url, content=content, headers={"Content-Type": "application/json"})
                    found = answer.json()
                    if "\udc80" in path:
                        assert (answer.status_code, found["code"]) == (400, "invalid_json")
                        continue
                    assert (answer.status_code, found["code"]) == (422, "path_not_allowed"), found
                    assert found["errors"][0]["pointer"] == f"#{field}"
            if "\udc80" not in path:
                answer = client.get("/v1/models/inspect", params={"path": path})
                assert (answer.status_code, answer.json()["code"]) == (422, "path_not_allowed")


def test_nul_is_refused_in_a_query(client: TestClient) -> None:
    answer = client.get("/v1/models/inspect?path=/models/a%00b")
    assert (answer.status_code, answer.json()["code"]) == (422, "path_not_allowed")


def test_a_target_that_cannot_be_is_refused_by_the_dry_run_too(
    settings: Settings, sessions: Sessions, make_model: MakeModel, root: Path, tmp_path: Path
) -> None:
    """What the publication itself would refuse hours later."""
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    (open_folder / "with a space").mkdir()
    (open_folder / "link").symlink_to("with a space")
    (open_folder / "loop").symlink_to("loop")
    key = create_key(sessions, "test")
    app = create_app(settings.model_copy(update={"publish_urls": (f"file://{open_folder}",)}))
    with TestClient(app, headers={"Authorization": f"Bearer {key}"}) as client:
        model = make_model()
        for target, code in {
            f"file://{open_folder}/loop": "path_not_allowed",
            f"file://{open_folder}/{'n' * 256}": "invalid_publish",
            f"file://{open_folder}/link": "target_not_allowed",
        }.items():
            for url in ("/v1/jobs?dry_run=true", "/v1/jobs"):
                answer = client.post(url, json=body(model, publish={"to": target}))
                assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
        for folder in ("a/.git", ".cache/x", "a/.Git/b", "n" * 256):
            asked = body(model, publish={"repo_id": "org/x", "path_in_repo": folder, "hub_token": "t"})
            answer = client.post("/v1/jobs?dry_run=true", json=asked)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_publish"), folder
        for branch in ("a..b", "a//b", "x.lock", "a/", "a/.b"):
            asked = body(model, publish={"repo_id": "org/x", "revision": branch, "hub_token": "t"})
            answer = client.post("/v1/jobs?dry_run=true", json=asked)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_publish"), branch


def test_the_data_folder_is_no_place_for_models(settings: Settings, tmp_path: Path) -> None:
    """Though a root holds it, as a home holds the data folder of the local stack; but for a root inside it."""
    wide = settings.model_copy(update={"model_roots": (tmp_path,)})
    for place in ("", "artifacts/job_1/abc", "datasets/x.jsonl", "secret.key", "postgres"):
        with pytest.raises(Exception, match="not in a folder that this service may read") as caught:
            wide.find_input(str(wide.data_dir / place), field="/model/path")
        assert caught.value.code == "path_not_allowed"  # type: ignore[attr-defined]
    (tmp_path / "sneaky").symlink_to(wide.data_dir)
    with pytest.raises(Exception, match="not in a folder"):
        wide.find_input(str(tmp_path / "sneaky" / "secret.key"), field="/model/path")
    assert wide.find_input(str(tmp_path / "m"), field="") == tmp_path / "m"
    inside = settings.model_copy(update={"model_roots": (settings.data_dir / "models",)})
    assert inside.find_input(str(settings.data_dir / "models" / "m"), field="") == settings.data_dir / "models" / "m"
    same = settings.model_copy(update={"model_roots": (settings.data_dir,)})
    with pytest.raises(Exception, match="not in a folder"):
        same.find_input(str(settings.data_dir / "models"), field="")


def test_the_local_stack_has_no_root_in_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "data"
    (home / "logs").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(home / "logs")
    assert LocalStack(home)._model_roots == [tmp_path, tmp_path / ".cache" / "bitfoundry"]


def test_an_artifact_is_a_model_for_its_own_project_alone(
    settings: Settings, sessions: Sessions, client: TestClient, make_model: MakeModel, submit: Callable[..., str]
) -> None:
    job_id = submit()
    folder = settings.artifacts_dir / job_id / ("a" * 64)
    folder.parent.mkdir(parents=True)
    make_model().rename(folder)
    with sessions.begin() as session:
        job = session.get_one(Job, job_id)
        project = job.project_id
        session.add(Artifact(id="art_1", job_id=job_id, fence=1, manifest_sha256="a" * 64, path=str(folder),
                             num_bytes=1))  # fmt: skip
    other = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    stranger = {"Authorization": f"Bearer {create_key(sessions, 's', project_id=other)}"}
    asked = body(folder)
    assert client.post("/v1/jobs?dry_run=true", json=asked).status_code == 200
    assert client.get("/v1/models/inspect", params={"path": str(folder)}).status_code == 200
    for refused in (
        client.post("/v1/jobs?dry_run=true", json=asked, headers=stranger),
        client.get("/v1/models/inspect", params={"path": str(folder)}, headers=stranger),
        client.post("/v1/jobs?dry_run=true", json=body(folder.parent)),
        client.post("/v1/jobs?dry_run=true", json=body(settings.artifacts_dir)),
    ):
        assert (refused.status_code, refused.json()["code"]) == (422, "path_not_allowed")
    with sessions.begin() as session:
        assert owns_artifact(session, project, folder)
        assert not owns_artifact(session, other, folder)
