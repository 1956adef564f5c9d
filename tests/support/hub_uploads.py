"""The write side of our STAND-IN of the Hugging Face Hub (see ``hub_server``): repositories, large files, commits.

Requests that huggingface_hub 2.4 was seen to send without Xet: whoami, create repo and branch, preupload, LFS batch,
PUT (basic and in parts) to a second host that refuses tokens, verify, commit (NDJSON) with ``parentCommit`` and
``create_pr``, commits, discussions. NOT covered: Xet (with hf_xet installed and not disabled the client asks for
nothing else and has no way back to LFS, whatever the server says), resource groups, what the Hub does with model cards.
The 403 of a full account, with a text on a storage limit, is from memory, not seen.
"""

import base64
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.hub_server import HubServer, Repository

USER, ORGANIZATIONS = "alice", ("org",)
LFS_SUFFIXES = (".safetensors", ".bin", ".model", ".parquet", ".gguf", ".onnx")
LARGE_BYTES = 10 << 20
DATE = "2026-11-22T08:00:00.000Z"


def is_large(name: str, size: int) -> bool:
    return name.endswith(LFS_SUFFIXES) or size >= LARGE_BYTES


@dataclass(frozen=True)
class Commit:
    """A commit that was made by a request."""

    sha: str
    parent: str
    title: str
    message: str


@dataclass
class Hold:
    """A request that is held after ``skip`` matching ones; with ``after``, when all is done but the answer."""

    part: str
    after: bool
    skip: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@dataclass
class Faults:
    """The faults: each entry once, for the next request whose method and path have that text in it."""

    answers: list[tuple[str, int, str]] = field(default_factory=list)  # (text, status, X-Error-Message)
    cuts: list[tuple[str, int]] = field(default_factory=list)  # (text, after how many bytes of the body)
    lost: list[str] = field(default_factory=list)  # it is done, and no answer comes
    holds: list[Hold] = field(default_factory=list)
    retry_after: str = "1"

    def take_answer(self, request: str) -> tuple[int, str] | None:
        for entry in self.answers:
            if entry[0] in request:
                self.answers.remove(entry)
                return entry[1:]
        return None

    def take_cut(self, request: str) -> int | None:
        for entry in self.cuts:
            if entry[0] in request:
                self.cuts.remove(entry)
                return entry[1]
        return None

    def take_lost(self, request: str) -> bool:
        entry = next((text for text in self.lost if text in request), None)
        if entry is not None:
            self.lost.remove(entry)
        return entry is not None

    @contextmanager
    def hold(self, part: str, *, after: bool = False, skip: int = 0) -> Iterator[Hold]:
        """Hold the next matching request, or the one ``skip`` later, until the block ends."""
        hold = Hold(part, after, skip)
        self.holds.append(hold)
        try:
            yield hold
        finally:
            hold.go_on.set()

    def wait(self, request: str, *, after: bool) -> None:
        for hold in self.holds:
            if hold.part in request and hold.after == after:
                if hold.skip:
                    hold.skip -= 1
                    return
                self.holds.remove(hold)
                hold.reached.set()
                hold.go_on.wait(60)
                return


class Connection(Exception):
    """The line is cut: no answer."""


class Uploads:
    """The handler's routes that write. They send status and JSON by ``answer``."""

    hub: "HubServer"
    headers: Any
    rfile: Any

    def upload_routes(self) -> list[tuple[str, Any]]:
        api, repository = "/api/models/([^/]+/[^/]+)", "/([^/]+/[^/]+)"
        return [
            ("GET /api/whoami-v2", self._whoami),
            ("POST /api/validate-yaml", self._validate),
            ("POST /api/repos/create", self._create),
            (f"POST {api}/branch/([^/]+)", self._branch),
            (f"POST {api}/preupload/([^/]+)", self._preupload),
            (f"POST {repository}\\.git/info/lfs/objects/batch", self._batch),
            ("PUT /cdn/lfs/([0-9a-f]{64})", self._put),
            ("PUT /cdn/lfs/([0-9a-f]{64})/([0-9]+)", self._put_part),
            ("POST /cdn/lfs/([0-9a-f]{64})/complete", self._complete),
            (f"POST {repository}\\.git/info/lfs/verify", self._verify),
            (f"POST {api}/commit/([^/]+)", self._make_commit),
            (f"GET {api}/commits/([^/]+)", self._commits),
            (f"GET {api}/discussions", self._discussions),
        ]

    # The handler defines these.
    def error(self, status: int, code: str = "", message: str = "") -> Exception: ...
    def answer(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None: ...
    def has_token(self) -> bool: ...
    def find(self, model_id: str, revision: str) -> tuple["Repository", str, dict[str, bytes]]: ...
    def read_body(self) -> bytes: ...

    def _json(self) -> Any:
        return json.loads(self.read_body())

    def _need_writer(self, model_id: str) -> None:
        if not self.has_token():
            raise self.error(401, message="Invalid username or password.")
        if model_id.partition("/")[0] not in (USER, *ORGANIZATIONS) or self.hub.role == "read":
            raise self.error(403, message="You don't have the rights to do this")

    def _whoami(self, query: str) -> None:
        if not self.has_token():
            raise self.error(401, message="Invalid credentials in Authorization header")
        auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": self.hub.role}}
        orgs = [{"name": name} for name in ORGANIZATIONS]
        self.answer({"type": "user", "name": USER, "orgs": orgs, "auth": auth})

    def _validate(self, query: str) -> None:
        broken = "BROKEN" in self._json()["content"]
        errors = [{"message": "not a model card"}] if broken else []
        self.answer({"errors": errors, "warnings": []}, 400 if broken else 200)

    def _create(self, query: str) -> None:
        body = self._json()
        model_id = f"{body.get('organization') or USER}/{body['name']}"
        self._need_writer(model_id)
        if model_id in self.hub.repositories:
            raise self.error(409, message="You already created this model repo")
        private = body.get("visibility") == "private" or bool(body.get("private"))
        self.hub.add(model_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        self.answer({"url": f"{self.hub.url}/{model_id}", "name": model_id, "id": model_id})

    def _branch(self, model_id: str, branch: str, query: str) -> None:
        body = self._json()
        self._need_writer(model_id)
        repository, sha, _ = self.find(model_id, body.get("startingPoint", "main"))
        if branch in repository.refs:
            raise self.error(409, message="Reference already exists")
        repository.refs[branch] = sha
        self.answer({})

    def _preupload(self, model_id: str, revision: str, query: str) -> None:
        requested = self._json()["files"]
        if "create_pr" not in query:
            self._need_writer(model_id)
        _, _, files = self.find(model_id, revision)
        entries = []
        for file in requested:
            name, size = file["path"], file["size"]
            assert len(base64.b64decode(file["sample"])) == min(size, 512)
            mode = "lfs" if is_large(name, size) else "regular"
            entry: dict[str, Any] = {"path": name, "uploadMode": mode, "shouldIgnore": False}
            if name in files:
                entry["oid"] = sha256(files[name]) if mode == "lfs" else blob_id(files[name])
            entries.append(entry)
        self.answer({"files": entries})

    def _batch(self, model_id: str, query: str) -> None:
        body = self._json()
        assert body["operation"] == "upload" and body["hash_algo"] == "sha256"
        if not self.has_token():
            raise self.error(401, message="Invalid username or password.")
        if self.hub.quota_bytes is not None:
            used = sum(map(len, self.hub.lfs.values()))
            if used + sum(item["size"] for item in body["objects"]) > self.hub.quota_bytes:
                raise self.error(403, message="Private repository storage limit reached, please upgrade your plan.")
        objects = []
        for item in body["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.lfs:
                verify = {"href": f"{self.hub.url}/{model_id}.git/info/lfs/verify"}
                entry["actions"] = {"upload": self._way_in(item["oid"], item["size"]), "verify": verify}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def _way_in(self, oid: str, size: int) -> dict[str, Any]:
        base, part = f"{self.hub.cdn_url}/lfs/{oid}", self.hub.part_bytes
        if not part or size <= part:
            return {"href": f"{base}?Signature=secret-signature"}
        number = -(-size // part)
        parts = {str(n): f"{base}/{n}?Signature=secret-signature" for n in range(1, number + 1)}
        return {"href": f"{base}/complete?Signature=secret-signature", "header": {"chunk_size": str(part), **parts}}

    def _need_signature(self, query: str) -> None:
        if "Authorization" in self.headers or "Signature=" not in query:
            raise self.error(400, message="Only one auth mechanism allowed")

    def _put(self, oid: str, query: str) -> None:
        self._need_signature(query)
        data = self.read_body()
        if sha256(data) != oid:
            raise self.error(400, message="The content has another hash")
        self.hub.lfs[oid] = data
        self.answer({})

    def _put_part(self, oid: str, number: str, query: str) -> None:
        self._need_signature(query)
        data = self.read_body()
        self.hub.parts[oid, int(number)] = data
        self.answer({}, headers={"ETag": hashlib.md5(data).hexdigest()})

    def _complete(self, oid: str, query: str) -> None:
        body = self._json()
        parts = [self.hub.parts[oid, part["partNumber"]] for part in body["parts"]]
        assert [hashlib.md5(part).hexdigest() for part in parts] == [part["etag"] for part in body["parts"]]
        if sha256(b"".join(parts)) != oid:
            raise self.error(400, message="The content has another hash")
        self.hub.lfs[oid] = b"".join(parts)
        self.answer({})

    def _verify(self, model_id: str, query: str) -> None:
        body = self._json()
        if len(self.hub.lfs.get(body["oid"], b"")) != body["size"]:
            raise self.error(404, message="missing object")
        self.answer({})

    def _make_commit(self, model_id: str, revision: str, query: str) -> None:
        lines = [json.loads(line) for line in self.read_body().splitlines()]
        if "create_pr" not in query:
            self._need_writer(model_id)
        elif not self.has_token():
            raise self.error(401, message="Invalid username or password.")
        repository, head, files = self.find(model_id, revision)
        if "create_pr" not in query and revision not in repository.refs:
            raise self.error(400, message="A commit is made on a branch")
        header = next(line["value"] for line in lines if line["key"] == "header")
        wanted = header.get("parentCommit")
        if wanted and wanted != head and "create_pr" not in query:
            raise self.error(412, message="A commit has happened since. Please refresh and try again.")
        parent = wanted or head
        files = dict(repository.commits[parent])
        for line in lines:
            self._apply(line["key"], line["value"], files)
        sha = hashlib.sha1(f"{len(repository.commits)} {parent} {header}".encode()).hexdigest()
        repository.commits[sha] = files
        repository.history.append(Commit(sha, parent, header["summary"], header.get("description", "")))
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{model_id}/commit/{sha}"}
        if "create_pr" in query:
            repository.pulls.append(header["summary"])
            repository.refs[f"refs/pr/{len(repository.pulls)}"] = sha
            answer["pullRequestUrl"] = f"{self.hub.url}/{model_id}/discussions/{len(repository.pulls)}"
        else:
            repository.refs[revision] = sha
        self.answer(answer)

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, bytes]) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in self.hub.lfs:
                raise self.error(422, message=f"LFS object {value['oid']} was not uploaded")
            files[value["path"]] = self.hub.lfs[value["oid"]]
        elif key == "deletedFile" and files.pop(value["path"], None) is None:
            raise self.error(404, "EntryNotFound", "A file with this name doesn't exist")

    def _commits(self, model_id: str, revision: str, query: str) -> None:
        repository, sha, _ = self.find(model_id, revision)
        by_sha = {commit.sha: commit for commit in repository.history}
        commits = []
        while sha in by_sha:
            commit = by_sha[sha]
            commits.append({"id": sha, "authors": [{"user": USER}], "date": DATE, "title": commit.title,
                            "message": commit.message})  # fmt: skip
            sha = commit.parent
        self.answer(commits)

    def _discussions(self, model_id: str, query: str) -> None:
        repository, _, _ = self.find(model_id, "main")
        assert urllib.parse.parse_qs(query)["type"] == ["pull_request"]
        discussions = [
            {"title": title, "num": number, "author": {"name": USER}, "createdAt": DATE, "status": "open",
             "repo": {"name": model_id, "type": "model"}, "isPullRequest": True}
            for number, title in enumerate(repository.pulls, 1)
        ]  # fmt: skip
        self.answer({"count": len(discussions), "start": 0, "discussions": discussions[::-1]})


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
