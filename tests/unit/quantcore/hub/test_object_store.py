"""Models in an object store, through obstore and its store of files. Tests of a real server are slow."""

import json
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from quantcore.checkpoint.headers import read_local
from quantcore.errors import ModelError
from quantcore.events import Event
from quantcore.hub import download as hub
from quantcore.hub import object_store
from quantcore.hub.names import find_local, is_remote, is_store_url
from tests.support.buckets import use_folders
from tests.support.models import tiny_model

URL = "s3://bucket/models/tiny"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder behind URL, with a model and with files that no model needs."""
    use_folders(tmp_path / "buckets", monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = tiny_model(tmp_path / "buckets/bucket/models/tiny")
    (found / "pytorch_model.bin").write_bytes(b"pickle")
    (found / "modeling.py").write_text("import os")
    (found / "checkpoint-1").mkdir()
    (found / "checkpoint-1/model.safetensors").write_bytes(b"another")
    return found


def silence(event: Event) -> None: ...


def fails(url: str = URL, revision: str = hub.MAIN) -> ModelError:
    with pytest.raises(ModelError) as caught:
        hub.download(url, revision, silence)
    return caught.value


def test_the_outline_has_the_headers_of_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get, num_bytes = obstore.get, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_bytes
        begin, end = options["options"]["range"]
        num_bytes += end - begin
        return get(*arguments, **options)

    monkeypatch.setattr(obstore, "get", counted)
    headers, sha = hub.read_headers(URL)
    assert headers == read_local(folder) and len(sha) == 40
    assert num_bytes < (folder / "model.safetensors").stat().st_size


def test_only_what_a_model_needs_is_copied(folder: Path) -> None:
    events: list[Event] = []
    copy = hub.download(URL, hub.resolve(URL), events.append)
    names = {path.name for path in copy.rglob("*")}
    assert names == {path.name for path in folder.iterdir()} - {"pytorch_model.bin", "modeling.py", "checkpoint-1"}
    for name in names:
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    assert events[-1].to_dict()["done"] == sum((folder / name).stat().st_size for name in names)


def test_modules_and_templates_come_with_the_model(folder: Path) -> None:
    """Those of sentence-transformers, and of chat templates; no other folder."""
    (folder / "modules.json").write_text("[]")
    for path in ("1_Pooling/config.json", "additional_chat_templates/rag.jinja", "onnx/model.onnx"):
        (folder / path).parent.mkdir()
        (folder / path).write_text("{}")
    copy = hub.download(URL, hub.MAIN, silence)
    names = {path.relative_to(copy).as_posix() for path in copy.glob("*/*")}
    assert names == {"1_Pooling/config.json", "additional_chat_templates/rag.jinja"}


def test_large_files_come_in_parts_and_whole_ones_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 1000)
    sha = hub.resolve(URL)
    get, failing = obstore.get, [True]

    def breaks(store: Any, path: str, **options: Any) -> Any:
        if path == "tokenizer.json" and failing[0]:
            raise GenericError("connection reset")
        return get(store, path, **options)

    monkeypatch.setattr(obstore, "get", breaks)
    assert fails(revision=sha).code == "store_unreachable"
    copy = object_store.cache_folder() / sha / "tiny"
    weights = (copy / "model.safetensors").stat().st_ino
    assert not (copy / "tokenizer.json").exists()
    failing[0] = False
    assert hub.download(URL, sha, silence) == copy
    assert (copy / "model.safetensors").stat().st_ino == weights
    assert (copy / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_another_content_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the copy, and while it is made."""
    sha = hub.resolve(URL)
    config = folder / "config.json"
    list_store = object_store.list_store

    def replaced(*arguments: Any) -> Any:
        listing = list_store(*arguments)
        config.write_text(config.read_text().swapcase())  # as long as before
        return listing

    monkeypatch.setattr(object_store, "list_store", replaced)
    assert fails(revision=sha).code == "model_changed"
    monkeypatch.setattr(object_store, "list_store", list_store)
    assert hub.resolve(URL) != sha and fails(revision=sha).code == "model_changed"


def test_a_published_folder_is_checked_with_its_manifest(folder: Path) -> None:
    entry = {"path": "config.json", "size": 1, "sha256": "0" * 64}
    (folder / "MANIFEST.json").write_text(json.dumps({"files": [entry]}))
    refused = fails()
    assert refused.code == "hub_hash_mismatch" and "config.json" in refused.message


def test_what_is_no_model(folder: Path) -> None:
    assert fails("s3://bucket/models/none").code == "store_not_found"
    assert fails("s3://bucket/models").code == "store_not_found"  # only folders are in there
    refused = fails(revision="v2")
    assert refused.code == "store_has_no_revisions" and "40 hex digits" in refused.hint
    assert fails("ftp://bucket/models/tiny").code == "invalid_model_id"


def test_faults_of_a_store_have_codes_and_tell_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code, is_retryable in (
        (PermissionDeniedError("secret"), "store_forbidden", False),
        (GenericError("status 403 Forbidden: SignatureDoesNotMatch secret"), "store_forbidden", False),
        (GenericError("status 404: <Code>NoSuchBucket</Code> secret"), "store_not_found", False),
        (GenericError("timed out secret"), "store_unreachable", True),
        (OSError(28, "No space left on device"), "disk_full", True),
        (PermissionError(13, "Permission denied"), "cache_not_writable", False),
    ):

        def refuse(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(obstore, "list_with_delimiter", refuse)
        refused = fails()
        assert (refused.code, refused.retryable) == (code, is_retryable)
        assert "secret" not in str(refused) + refused.hint


def test_names(tmp_path: Path) -> None:
    for url in (URL, "gs://bucket/a", "az://container/a/b", "s3://my.bucket-1/a_b/c.d"):
        assert is_store_url(url) and is_remote(url) and find_local(url) is None
    for text in (
        "s3://bucket", "s3://bucket/a/../b", "s3://user:key@bucket/a", "s3://bucket/a?x", "s3://bucket/a%2e",
        "http://host/a", "file:///a", "s3:bucket/a", "s3://bucket/a b", "s3://[bucket/a", "memory://a/b",
    ):  # fmt: skip
        assert not is_store_url(text), text
        with pytest.raises(ModelError, match="There is no model at"):
            find_local(text)
