"""From an attempt's folder to an artifact."""

import hashlib
import json
from pathlib import Path

import pytest

from api.settings import Settings
from api.store.queue.leases import Lease
from quantcore.errors import ProofError
from worker.workspace import Workspace, list_attempts

JOB = "job_" + "1" * 32


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(database_url="x", broker_url="x", data_dir=tmp_path)  # type: ignore[arg-type]


def attempt(settings: Settings, fence: int) -> Workspace:
    workspace = Workspace(settings, Lease(JOB, fence, 1, "prj", {}, {}, 1, None))
    workspace.create()
    return workspace


def write_output(workspace: Workspace, data: bytes = b"data") -> str:
    """Returns the manifest's hash."""
    workspace.output_dir.mkdir()
    (workspace.output_dir / "a.bin").write_bytes(data)
    entry = {"path": "a.bin", "size": 4, "sha256": hashlib.sha256(b"data").hexdigest()}
    text = json.dumps({"format": 1, "files": [entry]})
    (workspace.output_dir / "MANIFEST.json").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def test_publish_moves_a_whole_output(settings: Settings) -> None:
    workspace = attempt(settings, 7)
    sha256 = write_output(workspace)
    path, manifest = workspace.publish()
    assert path == settings.artifacts_dir / JOB / sha256
    assert manifest.sha256 == sha256
    assert (path / "a.bin").read_bytes() == b"data"
    assert not workspace.output_dir.exists()


def test_publish_refuses_a_damaged_output(settings: Settings) -> None:
    workspace = attempt(settings, 7)
    write_output(workspace, b"dat!")
    with pytest.raises(ProofError):
        workspace.publish()
    assert not list(settings.artifacts_dir.iterdir())


def test_the_same_output_twice_is_one_artifact(settings: Settings) -> None:
    for fence in (7, 8):
        workspace = attempt(settings, fence)
        write_output(workspace)
        path, _ = workspace.publish()
        workspace.remove()
    assert [folder.name for folder in path.parent.iterdir()] == [path.name]


def test_a_damaged_twin_is_moved_aside_not_deleted(settings: Settings) -> None:
    first = attempt(settings, 7)
    write_output(first)
    path, _ = first.publish()
    (path / "a.bin").write_bytes(b"dat!")
    second = attempt(settings, 8)
    write_output(second)
    assert second.publish()[0] == path
    assert (path / "a.bin").read_bytes() == b"data"
    [aside] = [folder for folder in path.parent.iterdir() if folder != path]
    assert (aside / "a.bin").read_bytes() == b"dat!"


def test_attempts_are_told_apart(settings: Settings) -> None:
    first, second = attempt(settings, 7), attempt(settings, 8)
    (settings.work_dir / "something else").mkdir()
    assert list_attempts(settings) == {first.folder: (JOB, 7), second.folder: (JOB, 8)}
    first.remove()
    assert list_attempts(settings) == {second.folder: (JOB, 8)}
