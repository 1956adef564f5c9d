"""A STAND-IN of the Hugging Face Hub for tests: its HTTP interface, on this machine, with faults.

It is ours, not the Hub. It does what huggingface_hub 2.4 was seen to ask for, and answers in the Hub's form: model
info, revision, tree, resolve with HEAD, GET and Range, X-Repo-Commit, ETag, X-Linked-*, X-Error-Code. Of a dataset
(``hub.add("datasets/org/name", files)``) what datasets 5.2 asks for: the same, and paths-info. As on the Hub a large
file (LFS) is a redirect to a second host, which refuses a request that carries a token (signed addresses do),
and a repository nobody may see is a 401. Uploads are in ``hub_uploads``. NOT covered: the Xet path (no X-Xet headers
are sent), rate-limit headers, and how the real Hub behaves under load.
"""

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.hub_uploads import Commit, Connection, Faults, Uploads, blob_id, is_large, sha256

TOKEN = "hf_canaryCanaryCanaryCanary"


@dataclass
class Repository:
    """A model's commits (sha -> files) and branches. ``gated``: listed for all, its files for nobody."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    history: list[Commit] = field(default_factory=list)  # what requests committed
    pulls: list[str] = field(default_factory=list)  # titles; pull request n is at refs/pr/n


@dataclass
class Request:
    """A request that the server got; its headers show the caller's rights."""

    method: str
    path: str
    headers: dict[str, str]


class HubServer:
    """A running stand-in: ``with HubServer() as hub: hub.add("org/name", folder)``; ``hub.url`` is an HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.drops: dict[str, list[int]] = {}  # file -> after how many bytes to cut the line, one entry an answer
        self.tampered: dict[str, bytes] = {}  # file -> what is sent in its place
        self.status: int | None = None  # of every answer, if set
        self.faults = Faults()
        self.lfs: dict[str, bytes] = {}  # large files by their SHA-256
        self.parts: dict[tuple[str, int], bytes] = {}
        self.part_bytes: int | None = None  # larger ones come in parts
        self.quota_bytes: int | None = None
        self.role = "write"  # of the token
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.cdn_url = f"http://localhost:{self.port}/cdn"  # another host to a client: the token must not go there

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, model_id: str, files: Path | Mapping[str, bytes], *, branch: str = "main", **rights: bool) -> str:
        """Commit ``files`` to a branch, return the commit's sha. A link is a file that holds its target, as in git."""
        content = _read(files) if isinstance(files, Path) else dict(files)
        repository = self.repositories.setdefault(model_id, Repository())
        for name, value in rights.items():
            setattr(repository, name, value)
        names = "".join(f"{name} {hashlib.sha1(data).hexdigest()}\n" for name, data in sorted(content.items()))
        sha = hashlib.sha1(f"{len(repository.commits)} {names}".encode()).hexdigest()
        repository.commits[sha] = content
        repository.refs[branch] = sha
        return sha

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        """Return the requests whose address has ``part`` in it."""
        return [request for request in self.requests if part in request.path and request.method == method]


def _read(folder: Path) -> dict[str, bytes]:
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            files[name] = str(path.readlink()).encode()
        elif path.is_file():
            files[name] = path.read_bytes()
    return files


def _entry(name: str, data: bytes) -> dict[str, Any]:
    """Return a file as the tree lists it."""
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
    if is_large(name, len(data)):  # git holds a pointer to it
        oid = sha256(data)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
        entry["oid"] = blob_id(pointer)
        entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": len(pointer)}
    return entry


class _Error(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if code:
            self.headers["X-Error-Code"] = code
        self.headers["X-Error-Message"] = message or code


class _Handler(BaseHTTPRequestHandler, Uploads):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body would wait 40 ms for the client to acknowledge the headers

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        self.hub.requests.append(Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        self._body: bytes | None = None
        try:
            self._go_wrong(f"{self.command} {path}")
            for pattern, handle in self._routes():
                address = f"{self.command} {path}" if pattern[0] != "/" else path
                if match := re.fullmatch(pattern, address):
                    handle(*(urllib.parse.unquote(part or "") for part in match.groups()), query)
                    return
            raise _Error(404)
        except (Connection, OSError):  # OSError: a client that was killed
            self.close_connection = True
        except _Error as error:
            with suppress(OSError):
                self.read_body()
                body = json.dumps({"error": error.headers["X-Error-Message"]}).encode()
                self._send(error.status, body, {"Content-Type": "application/json", **error.headers})

    def _go_wrong(self, request: str) -> None:
        faults = self.hub.faults
        if self.hub.status is not None:
            raise _Error(self.hub.status, Retry_After="1")
        if answer := faults.take_answer(request):
            raise _Error(answer[0], message=answer[1], Retry_After=faults.retry_after)
        cut = faults.take_cut(request)
        if cut is not None:
            self.rfile.read(cut)
            raise Connection
        faults.wait(request, after=False)

    def read_body(self) -> bytes:
        """Return the whole body, which is read once and kept. Raises Connection if the line was cut before its end."""
        if self._body is None:
            size = int(self.headers.get("Content-Length", 0))
            self._body = self.rfile.read(size)
            if len(self._body) < size:
                raise Connection
        return self._body

    def error(self, status: int, code: str = "", message: str = "") -> Exception:
        return _Error(status, code, message)

    def answer(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        request = f"{self.command} {self.path}"
        self.hub.faults.wait(request, after=True)
        if self.hub.faults.take_lost(request):
            raise Connection
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def has_token(self) -> bool:
        return self.headers.get("Authorization", "") == f"Bearer {TOKEN}"

    def find(self, model_id: str, revision: str) -> tuple[Repository, str, dict[str, bytes]]:
        return self._commit(model_id, revision)

    def _routes(self) -> list[tuple[str, Any]]:
        api, repository = "/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)", "((?:datasets/)?[^/]+/[^/]+)"
        return [
            *self.upload_routes(),
            (f"{api}/revision/([^/]+)", self._info),
            (f"{api}/tree/([^/]+)(?:/(.+))?", self._tree),
            (f"{api}/paths-info/([^/]+)", self._paths_info),
            (api, lambda model_id, query: self._info(model_id, "main", query)),
            (f"/cdn/{repository}/([0-9a-f]{{40}})/(.+)", self._cdn),
            (f"/{repository}/resolve/([^/]+)/(.+)", self._resolve),
        ]

    def _commit(self, model_id: str, revision: str) -> tuple[Repository, str, dict[str, bytes]]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            raise _Error(401, message="Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(model_id)
        if repository is None or (repository.private and not token):
            raise _Error(404 if token else 401, "RepoNotFound", "Repository not found")
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            raise _Error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, sha, repository.commits[sha]

    def _info(self, model_id: str, revision: str, query: str) -> None:
        repository, sha, files = self._commit(model_id, revision)
        siblings = [{"rfilename": name} for name in files]
        if "blobs=" in query:
            for sibling, (name, data) in zip(siblings, files.items(), strict=True):
                entry = _entry(name, data)
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    lfs = entry["lfs"]
                    sibling["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
        info = {"id": model_id, "modelId": model_id, "sha": sha, "private": repository.private}
        self._send_json(info | {"gated": repository.gated and "manual", "siblings": siblings, "tags": []}, sha)

    def _tree(self, model_id: str, revision: str, folder: str, query: str) -> None:
        """Send all files below ``folder`` with their folders; without ``recursive`` only direct entries."""
        _, sha, files = self._commit(model_id, revision)
        top = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for name, data in files.items():
            if not name.startswith(top):
                continue
            parts = name[len(top) :].split("/")
            for depth in range(1, len(parts)):
                path = top + "/".join(parts[:depth])
                entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
            entries[name] = _entry(name, data)
        if not entries and folder:
            raise _Error(404, "EntryNotFound", f"{folder} does not exist", X_Repo_Commit=sha)
        deep = "recursive=true" in query.lower()
        self._send_json([entry for path, entry in entries.items() if deep or "/" not in path[len(top) :]], sha)

    def _paths_info(self, model_id: str, revision: str, query: str) -> None:
        paths = json.loads(self.read_body())["paths"]
        _, sha, files = self._commit(model_id, revision)
        folders = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
                   for path in paths if any(name.startswith(f"{path}/") for name in files)]  # fmt: skip
        self._send_json(folders + [_entry(path, files[path]) for path in paths if path in files], sha)

    def _resolve(self, model_id: str, revision: str, name: str, query: str) -> None:
        repository, sha, files = self._commit(model_id, revision)
        if repository.gated:
            status = 403 if "Authorization" in self.headers else 401
            raise _Error(status, "GatedRepo", f"Access to model {model_id} is restricted.")
        if name not in files:
            raise _Error(404, "EntryNotFound", "Entry not found", X_Repo_Commit=sha)
        entry = _entry(name, files[name])
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
            target = f"{self.hub.cdn_url}/{model_id}/{sha}/{urllib.parse.quote(name)}?Signature=secret-signature"
            self._send(302, b"", headers | {"Location": target})
        else:
            self._send_file(name, files[name], headers)

    def _cdn(self, model_id: str, sha: str, name: str, query: str) -> None:
        if "Authorization" in self.headers or "Signature=" not in query:
            raise _Error(400, message="Only one auth mechanism allowed")
        data = self.hub.repositories[model_id].commits[sha][name]
        self._send_file(name, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"})

    def _send_file(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        data = self.hub.tampered.get(name, data)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, data, headers, drops=self.hub.drops.get(name))
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first > last:
            raise _Error(416, Content_Range=f"bytes */{len(data)}")
        headers |= {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._send(206, data[first : last + 1], headers, drops=self.hub.drops.get(name))

    def _send_json(self, data: Any, sha: str) -> None:
        self._send(200, json.dumps(data).encode(), {"Content-Type": "application/json", "X-Repo-Commit": sha})

    def _send(self, status: int, body: bytes, headers: dict[str, str], drops: list[int] | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if drops:
            body = body[: drops.pop(0)]
            self.close_connection = True
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has hung up

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: tests read ``HubServer.requests``."""
