"""Getting the result: whole, in ranges, never another file, never a damaged one."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote_to_bytes

import anyio
import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from api.store import manifest
from api.store.engine import Sessions
from api.store.queue import leases
from quantcore.errors import ProofError

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def done(settings: Settings, sessions: Sessions, submit: Callable[..., str]) -> tuple[str, Path]:
    """A succeeded job and its folder, beside which lies something secret."""
    job_id = submit()
    files = {"model.safetensors": WEIGHTS, "quark/config.json": b"{}", "odd name+é.txt": b"odd"}
    folder = settings.artifacts_dir / job_id / "x"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    entries = [
        {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    ]
    (folder / "MANIFEST.json").write_text(json.dumps({"format": 1, "files": entries}))
    (folder / "unlisted.txt").write_text("secret")
    (folder.parent / "secret.txt").write_text("secret")
    found = manifest.read(folder)
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
        assert lease
        leases.succeed(
            session, lease, manifest_sha256=found.sha256, path=str(folder), num_bytes=found.num_bytes, summary={}
        )
    return job_id, folder


def test_whole_files(client: TestClient, done: tuple[str, Path]) -> None:
    job_id, folder = done
    listing = client.get(f"/v1/jobs/{job_id}/artifacts").json()["data"]
    assert len(listing) == 4
    for file in listing:
        answer = client.get(f"/v1/jobs/{job_id}/artifacts/{file['path']}")
        assert answer.status_code == 200, file
        assert answer.content == (folder / file["path"]).read_bytes()
        assert hashlib.sha256(answer.content).hexdigest() == file["sha256"]
        assert len(answer.content) == file["bytes"]
        assert answer.headers["etag"] == f'"{file["sha256"]}"'
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["accept-ranges"] == "bytes"


def test_all_files_as_one_archive(client: TestClient, done: tuple[str, Path], tmp_path: Path) -> None:
    """It unpacks into one folder, with the manifest, and with nothing that the manifest does not list."""
    job_id, folder = done
    answer = client.get(f"/v1/jobs/{job_id}/artifacts.tar")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    name = answer.headers["content-disposition"].partition('filename="')[2].removesuffix('.tar"')
    assert name.endswith(job_id[-6:])
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    top = tmp_path / "out" / name
    unpacked = {path.relative_to(top).as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert unpacked == {"model.safetensors", "quark/config.json", "odd name+é.txt", "MANIFEST.json"}
    assert all((top / each).read_bytes() == (folder / each).read_bytes() for each in unpacked)


def test_a_damaged_file_ends_the_archive_early(client: TestClient, done: tuple[str, Path]) -> None:
    job_id, folder = done
    (folder / "quark" / "config.json").write_bytes(b"[]")
    with pytest.raises(RuntimeError, match="response already started") as ended:
        client.get(f"/v1/jobs/{job_id}/artifacts.tar")
    assert isinstance(ended.value.__cause__, ProofError) and "quark/config.json" in str(ended.value.__cause__)


def test_a_job_without_a_result_has_no_archive(client: TestClient, submit: Callable[..., str]) -> None:
    answer = client.get(f"/v1/jobs/{submit()}/artifacts.tar")
    assert (answer.status_code, answer.json()["code"]) == (409, "not_ready")


def test_ranges_and_etags(client: TestClient, done: tuple[str, Path]) -> None:
    url = f"/v1/jobs/{done[0]}/artifacts/model.safetensors"
    part = client.get(url, headers={"Range": "bytes=100-299"})
    assert (part.status_code, part.content) == (206, WEIGHTS[100:300])
    assert part.headers["content-range"] == f"bytes 100-299/{len(WEIGHTS)}"
    tail = client.get(url, headers={"Range": "bytes=-5"})
    assert (tail.status_code, tail.content) == (206, WEIGHTS[-5:])
    assert client.get(url, headers={"Range": f"bytes={len(WEIGHTS)}-"}).status_code == 416
    tag = part.headers["etag"]
    assert client.get(url, headers={"Range": "bytes=0-9", "If-Range": tag}).status_code == 206
    assert client.get(url, headers={"Range": "bytes=0-9", "If-Range": '"old"'}).status_code == 200
    assert client.get(url, headers={"If-None-Match": tag}).status_code == 304
    many = ",".join(f"{n}-{n}" for n in range(0, 10_000, 2))
    assert client.get(url, headers={"Range": f"bytes={many}"}).status_code in (200, 206, 400, 416)


NOT_LISTED = (
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e/secret.txt",
    "%252e%252e%252fsecret.txt",
    "..\\secret.txt",
    "..%5csecret.txt",
    "quark/../model.safetensors",
    "quark/../../secret.txt",
    "./model.safetensors",
    "quark//config.json",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "//host/share",
    "file:///etc/passwd",
    "model.safetensors%00",
    "model.safetensors/",
    "quark",
    "quark/",
    "",
    "unlisted.txt",
    "MODEL.safetensors",
)


def test_only_names_in_the_manifest_exist(
    subtests: pytest.Subtests, client: TestClient, done: tuple[str, Path]
) -> None:
    job_id, _ = done
    for path in NOT_LISTED:
        with subtests.test(path):
            sent, content = ask_raw(client, f"/v1/jobs/{job_id}/artifacts/{path}".encode())
            assert sent in ([404], [307]), (sent, content)
            assert b"secret" not in content.replace(b"secret.txt", b"")
            assert b"root:" not in content


def ask_raw(client: TestClient, raw: bytes) -> tuple[list[int], bytes]:
    """GET a path as it is: the client's own tidying of ``..`` must not hide what the server does."""
    sent: list[int] = []
    content: list[bytes] = []

    async def request() -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": unquote_to_bytes(raw).decode("latin-1"), "raw_path": raw, "query_string": b"", "root_path": "",
            "headers": [(b"authorization", client.headers["Authorization"].encode())],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip

        async def receive() -> dict[str, object]:
            await anyio.sleep(0)
            return (
                {"type": "http.request", "body": b"", "more_body": False} if not sent else {"type": "http.disconnect"}
            )

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                sent.append(int(str(message["status"])))
            elif isinstance(body := message.get("body"), bytes):
                content.append(body)

        await client.app(scope, receive, send)  # type: ignore[call-arg, arg-type, misc]

    assert client.portal is not None
    client.portal.call(request)
    return sent, b"".join(content)


def test_a_file_that_changed_is_not_sent(client: TestClient, done: tuple[str, Path]) -> None:
    job_id, folder = done
    url = f"/v1/jobs/{job_id}/artifacts/model.safetensors"
    assert client.get(url).status_code == 200
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"!")
    for _ in range(2):
        answer = client.get(url, headers={"Range": "bytes=0-1"})
        assert (answer.status_code, answer.json()["code"]) == (500, "artifact_corrupt")
        assert "model.safetensors" in answer.json()["detail"]
    assert client.get(f"/v1/jobs/{job_id}/artifacts/quark/config.json").status_code == 200
    (folder / "model.safetensors").unlink()
    assert client.get(url).json()["code"] == "artifact_corrupt"


def test_a_file_that_became_a_link_is_not_sent(client: TestClient, done: tuple[str, Path]) -> None:
    job_id, folder = done
    target = folder.parent / "same.bin"
    target.write_bytes(WEIGHTS)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    assert client.get(f"/v1/jobs/{job_id}/artifacts/model.safetensors").json()["code"] == "artifact_corrupt"


def test_a_manifest_that_changed_is_not_believed(client: TestClient, done: tuple[str, Path]) -> None:
    job_id, folder = done
    content = json.loads((folder / "MANIFEST.json").read_text())
    content["files"].append({"path": "unlisted.txt", "size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()})
    (folder / "MANIFEST.json").write_text(json.dumps(content))
    for path in ("", "/unlisted.txt", "/model.safetensors", "/MANIFEST.json"):
        answer = client.get(f"/v1/jobs/{job_id}/artifacts{path}")
        assert (answer.status_code, answer.json()["code"]) == (500, "artifact_corrupt"), path


def test_not_before_the_job_succeeded(client: TestClient, submit: Callable[..., str]) -> None:
    job_id = submit()
    for path in ("", "/model.safetensors"):
        answer = client.get(f"/v1/jobs/{job_id}/artifacts{path}")
        assert (answer.status_code, answer.json()["code"]) == (409, "not_ready")
