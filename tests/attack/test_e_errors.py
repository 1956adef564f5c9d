"""Errors and small things: what is odd has a named error, whatever file, archive or request it comes in."""

from __future__ import annotations

import io
import json
import resource
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, text

from api.http import descriptors
from api.jobs.archive import Archive
from api.jobs.retention_task import remove_artifacts
from api.main import create_app
from api.settings import Settings
from api.store import migrate
from api.store.engine import Sessions
from api.store.queue import jobs
from api.store.tables.jobs import Job
from bitfoundry.errors import StackError
from bitfoundry.local import backup
from bitfoundry.local.stack import LocalStack
from quantcore.engine.data.media import Reference
from quantcore.engine.data.media_files import content_of
from quantcore.errors import ConfigError, QuantError
from tests.support.api import PLACES, post, walk
from tests.support.service import Server, WorkerProcess

DUMP = ("database.dump", b"x")


def member(name: str, content: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in more.items():
        setattr(info, attribute, value)
    return info, content


def write_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], **how: Any) -> Path:
    with tarfile.open(path, "w", **how) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def manifest(**fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member("MANIFEST.json", json.dumps({"format": 1, "home": "/x", "files": []} | fields).encode())


ODD: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {
    "nothing": [],
    "a hard link to nothing": [member("artifacts/job_1/a", type=tarfile.LNKTYPE, linkname="gone")],
    "a link": [member("artifacts/job_1/a", type=tarfile.SYMTYPE, linkname="/etc")],
    "a device": [member("artifacts/job_1/a", type=tarfile.CHRTYPE)],
    "a folder": [member("artifacts/job_1", type=tarfile.DIRTYPE)],
    "no name": [member("")],
    "a point": [member(".")],
    "the name of a folder": [member("artifacts")],
    "a file as folder": [member("artifacts/job_1", b"x"), member("artifacts/job_1/a", b"x")],
    "twice": [member("artifacts/job_1/a", b"x"), member("artifacts/job_1/a", b"y")],
    "twice, by other words": [member("artifacts/job_1/a", b"x"), member("artifacts/./job_1//a", b"y")],
    "names that look alike": [member("artifacts/job_1/A", b"x"), member("artifacts/job_1/a", b"y")],
    "composed in two ways": [member("artifacts/job_1/\u00e9", b"x"), member("artifacts/job_1/e\u0301", b"y")],
    "a name too long": [member("artifacts/job_1/" + "a" * 300, b"x")],
    "out of the folder": [member("artifacts/../../a", b"x")],
    "another key": [member("SECRET.KEY", b"x")],
    "a list": [member("MANIFEST.json", b"[1]")],
    "no JSON": [member("MANIFEST.json", b"{")],
    "deep": [member("MANIFEST.json", b"[" * 100_000)],
    "no text": [member("MANIFEST.json", b"\xff\xfe")],
    "no files": [manifest(files=None)],
    "odd files": [manifest(files=[1])],
    "no home": [manifest(home=7)],
    "no dump": [manifest()],
}


NO_MANIFEST = "nothing,zeros,a list,no JSON,deep,no text,no files,odd files,no home,no dump".split(",")


@pytest.mark.parametrize("case", [*ODD, "zeros", "text", "empty", "cut"])
def test_an_odd_backup_is_named_and_leaves_nothing(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_load", lambda *_: pytest.fail("it was restored"))
    file = write_tar(tmp_path / "backup", ODD.get(case, [member(*DUMP)]))
    if case in ("zeros", "text", "empty"):
        file.write_bytes({"zeros": bytes(5000), "text": b"no tar " * 1000, "empty": b""}[case])
    elif case == "cut":
        file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(StackError) as refused:
        backup.restore(file, tmp_path / "home", print, vault=None, trusted=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup"]
    assert ("its manifest" in refused.value.message) == (case in NO_MANIFEST), "refused for another reason"
    assert "Errno" not in refused.value.message and ".restoring" not in refused.value.message


def test_data_of_a_newer_release_are_named(postgres_url: str, tmp_path: Path) -> None:
    engine = create_engine(postgres_url)
    with engine.begin() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    try:
        with pytest.raises(ConfigError, match="newer release") as refused:
            migrate.upgrade(postgres_url)
        assert refused.value.code == "newer_schema"
        with pytest.raises(StackError, match="newer release"):
            LocalStack(tmp_path)._migrate(postgres_url)
    finally:
        with engine.begin() as session:
            session.execute(text(f"UPDATE alembic_version SET version_num = '{migrate.newest()}'"))
        engine.dispose()


@pytest.mark.parametrize("source", ["data:image/png;base64,\u00e9", "data:image/png;base64,a", "data:;base64,\ud800"])
def test_base64_that_is_none_is_named(source: str) -> None:
    with pytest.raises(QuantError) as refused:
        content_of(Reference("image", source), None)
    assert refused.value.code == "bad_media"


def test_links_in_a_loop_are_no_model(client: TestClient, settings: Settings, make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "loop.safetensors").symlink_to(folder / "loop.safetensors")
    (settings.model_roots[0] / "loop").symlink_to(settings.model_roots[0] / "loop")
    answer = client.get("/v1/models/folders")
    assert answer.status_code == 200, answer.text
    assert [found["path"] for found in answer.json()["data"]] == [str(folder)]


def test_a_redirect_does_not_name_the_host_of_the_request(client: TestClient) -> None:
    for path in ("/v1/jobs/", "/", "//evil.example/v1/jobs/", "/v1/keys/?a=b"):
        answer = client.get(path, headers={"Host": "evil.example"}, follow_redirects=False)
        location = answer.headers.get("location", "/")
        assert location.startswith("/") and not location.startswith("//") and "evil.example/" not in location[:2]
        assert "://" not in location


def test_no_json_is_kept_on_the_way(client: TestClient, settings: Settings) -> None:
    """Of every route that can be asked without a body; what names another rule itself keeps it."""
    for method, path in walk(create_app(settings)):
        if method == "GET" and "stream" not in path:
            answer = client.get(path.format(**PLACES))
            if "json" in answer.headers.get("content-type", ""):
                assert "no-store" in answer.headers["cache-control"], path


def test_two_lengths_end_the_connection(server: Server) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=20) as line:
        head = "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        line.sendall(head.encode() + b"GET /healthz/live HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = b""
        while part := line.recv(65536):
            heard += part
    assert heard.startswith(b"HTTP/1.1 400 ") and heard.count(b"HTTP/1.1") == 1


def test_an_archive_is_sent_to_its_end_though_its_job_is_deleted(
    client: TestClient, make_model: Callable[..., Path], start_worker: Callable[..., WorkerProcess],
    wait_for: Callable[..., Job], settings: Settings, sessions: Sessions,
) -> None:  # fmt: skip
    job_id = post(client, make_model())
    start_worker()
    job = wait_for(job_id, "succeeded")
    with sessions.begin() as session:
        artifact = jobs.find_artifact(session, job)
    assert artifact is not None
    archive = Archive.of(artifact, job)
    num_bytes, parts = archive.num_bytes(), archive.content()
    first = next(parts)
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    content = first + b"".join(parts)
    assert len(content) == num_bytes
    remove_artifacts(settings, [job_id])  # as the cleanup of what no row names: nobody reads it any more
    assert not (settings.artifacts_dir / job_id).exists()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert any(name.endswith("/model.safetensors") for name in tar.getnames())


def test_too_few_descriptors_are_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
    for soft, hard, wanted, warns in (
        (256, 512, (512, 512), True),
        (256, 4096, (descriptors.NEEDED, 4096), False),
        (256, resource.RLIM_INFINITY, (descriptors.NEEDED, resource.RLIM_INFINITY), False),
        (65536, 65536, None, False),
    ):
        given.clear()
        caplog.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda what, limits=(soft, hard): limits)
        descriptors.check()
        assert given == ([wanted] if wanted else [])
        assert bool(caplog.records) == warns


def test_the_audit_log_names_the_scheme_of_a_webhook(client: TestClient) -> None:
    from api.store.tables.accounts import Webhook
    from api.webhooks.endpoints import _audited

    webhook = Webhook(format="slack")
    assert _audited(webhook, {"url": "http://10.0.0.1/secret"}) == {"url": "http://10.0.0.1/…"}
