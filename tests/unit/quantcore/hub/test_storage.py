"""Artifacts copied to folders at URLs: on this machine, and through obstore (tests of a real store are slow)."""

import json
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from pydantic import ValidationError

from quantcore.errors import QuantError
from quantcore.hub import storage
from quantcore.hub.names import is_below
from quantcore.hub.push_task import MANIFEST, PublishTask, digest
from quantcore.hub.storage import NOTE, store
from quantcore.hub.target import Target
from tests.support.buckets import use_folders
from tests.support.publishing import assert_is_there, make_task, silence, task_of


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use_folders(tmp_path / "buckets", monkeypatch)
    return f"file://{tmp_path}/out/model" if request.param == "file" else "s3://bucket/out/model"


def to(task: PublishTask, url: str, *, replace: bool = False) -> PublishTask:
    return task.model_copy(update={"target": Target(to=url, replace=replace)})


def read(url: str) -> dict[str, bytes]:
    folder = storage._open(url)
    return {path: folder.read(path) for path in folder.present()}


def test_the_files_and_the_manifest(url: str, tmp_path: Path) -> None:
    task = to(make_task(tmp_path / "a"), url)
    done = store(task, silence)
    found = read(url)
    assert_is_there(task, found)
    assert set(found) == {MANIFEST, *(file.path for file in task.files)}
    assert (done.revision, done.url, done.is_new) == (digest(found[MANIFEST]), url, True)
    again = store(task, silence)
    assert (again.revision, again.is_new, again.num_bytes) == (done.revision, False, 0)


def test_another_artifact_takes_its_place(url: str, tmp_path: Path) -> None:
    store(to(task_of(tmp_path / "a", {"1.safetensors": b"1", "2.safetensors": b"2"}), url), silence)
    other = task_of(tmp_path / "b", {"1.safetensors": b"one"})
    before = read(url)
    with pytest.raises(QuantError, match="another artifact") as refused:
        store(to(other, url), silence)
    assert refused.value.code == "target_occupied" and "--replace" in refused.value.hint
    assert read(url) == before
    task = to(other, url, replace=True)
    store(task, silence)
    assert set(read(url)) == {MANIFEST, "1.safetensors"}
    assert_is_there(task, read(url))


def test_whoever_is_there_already_is_left_alone(url: str, tmp_path: Path) -> None:
    storage._open(url).write("precious.txt", [b"mine"])
    with pytest.raises(QuantError) as caught:
        store(to(make_task(tmp_path / "a"), url), silence)
    assert caught.value.code == "target_occupied"
    assert read(url) == {"precious.txt": b"mine"}


def test_a_copy_that_was_broken_off_is_never_whole_and_is_taken_up(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file, over an older artifact too: a folder with a manifest holds what that says."""
    store(to(task_of(tmp_path / "old", {"config.json": b"old"}), url), silence)
    task = to(make_task(tmp_path / "a"), url, replace=True)
    copy: Any = storage._copy

    for number in range(len(task.files)):
        left = [number]

        def dies(*arguments: Any, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            copy(*arguments)

        monkeypatch.setattr(storage, "_copy", dies)
        with pytest.raises(KeyboardInterrupt):
            store(task, silence)
        assert MANIFEST not in read(url) and NOTE in read(url)
    monkeypatch.setattr(storage, "_copy", copy)
    store(to(task, url), silence)  # its own first try needs no consent
    assert_is_there(task, read(url))
    assert NOTE not in read(url)


def test_what_is_damaged_is_not_copied_as_whole(url: str, tmp_path: Path) -> None:
    task = to(make_task(tmp_path / "a"), url)
    (tmp_path / "a/README.md").write_bytes(b"# X\n")
    with pytest.raises(QuantError) as caught:
        store(task, silence)
    assert caught.value.code == "artifact_corrupt"
    assert MANIFEST not in read(url)


def test_errors_have_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_folders(tmp_path / "buckets", monkeypatch)
    task = make_task(tmp_path / "a")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(QuantError) as caught:
        store(to(task, f"file://{tmp_path}/file/x"), silence)
    assert caught.value.code == "target_unreachable"

    def fails(error: Exception) -> Any:
        def copy(*_: Any) -> None:
            raise error

        return copy

    for number, (error, code) in enumerate(
        (
            (OSError(28, "No space left on device"), "disk_full"),
            (PermissionError(13, "no"), "target_forbidden"),
            (PermissionDeniedError("secret"), "target_forbidden"),
            (GenericError("403 Forbidden: <Code>QuotaExceeded</Code>"), "disk_full"),
            (GenericError("404 Not Found: <Code>NoSuchBucket</Code>"), "target_not_found"),
            (RuntimeError("it says AKIA-secret"), "target_unreachable"),
        )
    ):
        monkeypatch.setattr(storage, "_copy", fails(error))
        with pytest.raises(QuantError) as caught:
            store(to(task, f"s3://bucket/{number}"), silence)
        assert caught.value.code == code
        assert "secret" not in str(caught.value)


def test_targets_that_are_none() -> None:
    for given in (
        {}, {"repo_id": "a/b", "to": "file:///x"}, {"repo_id": "../x"}, {"repo_id": "name"}, {"repo_id": "a/b/c"},
        {"repo_id": "a/b", "path_in_repo": "../x"}, {"repo_id": "a/b", "path_in_repo": "/x"},
        {"repo_id": "a/b", "path_in_repo": ".git/x"}, {"repo_id": "a/b", "path_in_repo": "a//b"},
        {"repo_id": "a/b", "create_pr": True, "revision": "int4"}, {"repo_id": "a/b", "revision": "../x"},
        {"repo_id": "a/b", "commit_message": "a\nb"}, {"repo_id": "a/b", "private": "yes"},
        {"repo_id": "a/b", "replace": True},
        {"to": "file:///x", "private": True}, {"to": "/srv/x"}, {"to": "file:x"}, {"to": "file://host/x"},
        {"to": "s3://bucket/a/../b"}, {"to": "s3://bucket/a%2e%2e/b"}, {"to": "s3://user:secret@bucket/a"},
        {"to": "s3://bucket/a?x=1"}, {"to": "s3://bucket/a#x"}, {"to": "simplecache::s3://bucket/a"},
        {"to": "s3://bucket/a\\b"}, {"to": "s3://bucket"}, {"to": "s3://bucket/a b"}, {"to": "file:///"},
    ):  # fmt: skip
        with pytest.raises(ValidationError) as caught:
            Target.model_validate(given)
        assert "secret" not in json.dumps(caught.value.errors(include_input=False, include_url=False))
    for fine in ("s3://bucket/models/name", "file:///srv/models", "gs://b/x-1/y.z"):
        assert Target(to=fine).to == fine


def test_below_is_by_whole_parts() -> None:
    allowed = ("s3://bucket/models/", "file:///srv/out")
    for url in ("s3://bucket/models", "s3://bucket/models/a", "file:///srv/out/x/y"):
        assert is_below(url, allowed)
    for url in ("s3://bucket/models2/a", "s3://bucket", "file:///srv/outside", "gs://bucket/models/a"):
        assert not is_below(url, allowed)
