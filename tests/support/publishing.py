"""Publishing tasks with small files."""

import hashlib
import json
from pathlib import Path

from quantcore.events import Event
from quantcore.hub.push_task import MANIFEST, ManifestFile, PublishTask
from quantcore.hub.target import Target

WEIGHTS = bytes(range(256)) * 8192  # 2 MiB


def make_task(folder: Path, *, attempt: int = 1, publication_id: str = "pub_1", **target: object) -> PublishTask:
    files = {"model.safetensors": WEIGHTS, "config.json": b'{"a": 1}', "sub/report.json": b"{}", "README.md": b"# M\n"}
    return task_of(folder, files, attempt=attempt, publication_id=publication_id, **target)


def task_of(
    folder: Path, files: dict[str, bytes], *, attempt: int = 1, publication_id: str = "pub_1", **target: object
) -> PublishTask:
    listed = []
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        listed.append(ManifestFile(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return PublishTask(
        publication_id=publication_id, attempt=attempt, folder=folder, files=tuple(listed),
        target=Target.model_validate({"repo_id": "org/new"} | target),
    )  # fmt: skip


def silence(event: Event) -> None:
    pass


def assert_is_there(task: PublishTask, found: dict[str, bytes], top: str = "") -> None:
    manifest = json.loads(found[top + MANIFEST])
    assert manifest["format"] == 1
    assert [entry["path"] for entry in manifest["files"]] == sorted(file.path for file in task.files)
    for entry in manifest["files"]:
        data = found[top + entry["path"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"])
