"""Publishes an artifact as one commit on the Hugging Face Hub. Read ``push`` first.

A push may be killed at any moment and resumed: large files that the Hub has are not sent twice. The commit is one
atomic request. It names its parent, so that it never lands on a branch that has moved. It carries the publication's id,
so that a later attempt finds a commit whose response was lost. Files that are already there cause no commit.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from quantcore.config.time_limits import HUB_S
from quantcore.errors import PublishError
from quantcore.events import Emit, PhaseStarted, Published
from quantcore.hub.push_errors import conflict, hub_explained
from quantcore.hub.push_progress import ByteProgress
from quantcore.hub.push_task import MANIFEST, PublishTask, digest, listed
from quantcore.hub.repository import Repository, git_sha1, git_sha1_of
from quantcore.hub.session import hub_api
from quantcore.hub.target import MAIN

MAX_TRIES = 4  # of a commit whose branch moves, or whose response is lost
MAX_WAIT_S = 60.0  # the longest delay that the Hub may ask for
MAX_PULL_REQUESTS = 50
MAX_MANIFEST_BYTES = 16 << 20
LARGE_BYTES = 1 << 20  # larger files are sent one by one, so that progress shows the end of each

T = TypeVar("T")


@dataclass(frozen=True)
class _Push:
    """State shared by the steps of a push."""

    api: HfApi
    task: PublishTask
    repo_id: str
    manifest: bytes

    @property
    def revision(self) -> str:
        return self.task.target.revision

    @property
    def mark(self) -> str:
        """The line in the commit message by which a later attempt finds the commit."""
        return f"Bitfoundry-Publication: {self.task.publication_id}"

    def url_of(self, sha: str) -> str:
        return f"{self.api.endpoint}/{self.repo_id}/commit/{sha}"


def push(task: PublishTask, token: str, emit: Emit) -> Published:
    """Publish the artifact to ``task.target``. Raises ProofError ``artifact_corrupt`` and PublishError ``hub_*``."""
    repo_id = task.target.repo_id
    assert repo_id is not None
    if not token:  # the library would look for its own token
        raise PublishError("Publishing to the Hub needs a token.", code="hub_token_required")
    emit(PhaseStarted("publish"))
    work = _Push(hub_api(token), task, repo_id, task.manifest())
    task.check_files()
    with hub_explained(repo_id, task.target.revision):
        may_be_there = task.attempt > 1
        for _ in range(MAX_TRIES):
            head = _ensure_branch(work)
            if may_be_there and (done := _find_commit(work)) and not _find_wrong(work, done.revision):
                return done
            operations = _compare(work, head)
            if not operations:
                return Published(head, work.url_of(head), is_new=False, num_bytes=0)
            num_bytes = _upload(work, operations, emit)
            try:
                sha, url = _commit(work, operations, head)
            except httpx2.TransportError:  # the commit may exist: look before trying again
                may_be_there = True
                continue
            except HfHubHTTPError as error:
                if error.response.status_code not in (409, 412):  # another commit came first
                    raise
                continue
            if wrong := _find_wrong(work, sha):
                raise PublishError(
                    f"The commit {sha} does not contain '{wrong}' as it was sent.",
                    code="hub_hash_mismatch",
                    hint="Publish again.",
                    retryable=True,
                )
            return Published(sha, url, is_new=True, num_bytes=num_bytes)
        raise conflict(repo_id)


def _ensure_branch(work: _Push) -> str:
    """Create the repository and the branch if they are missing; returns the commit of the branch."""
    for _ in range(3):
        try:
            info = _patiently(lambda: work.api.model_info(work.repo_id, revision=work.revision, timeout=HUB_S))
            if info.sha is None:
                raise ValueError("the answer names no commit")
            return info.sha
        except RevisionNotFoundError:
            if work.revision == MAIN:
                raise
            _patiently(lambda: work.api.create_branch(work.repo_id, branch=work.revision, exist_ok=True))
        except RepositoryNotFoundError:
            _patiently(lambda: _create(work))
    raise PublishError(
        f"The repository '{work.repo_id}' was created, but cannot be found.", code="hub_unreachable", retryable=True
    )


def _create(work: _Push) -> None:
    work.api.create_repo(work.repo_id, private=work.task.target.private, exist_ok=True)


def _find_commit(work: _Push) -> Published | None:
    """Find the commit of an earlier attempt at this publication, if there is one."""
    if not work.task.target.create_pr:
        sha = _find_marked(work, work.revision)
        return (sha and Published(sha, work.url_of(sha), is_new=True, num_bytes=0)) or None
    requests = work.api.get_repo_discussions(work.repo_id, discussion_type="pull_request")
    for request in islice(requests, MAX_PULL_REQUESTS):
        sha = _find_marked(work, f"refs/pr/{request.num}")
        if sha:
            return Published(sha, request.url, is_new=True, num_bytes=0)
    return None


def _find_marked(work: _Push, revision: str) -> str | None:
    commits = work.api.list_repo_commits(work.repo_id, revision=revision)
    return next((commit.commit_id for commit in commits if work.mark in commit.message.splitlines()), None)


Operations = list[CommitOperationAdd | CommitOperationDelete]


def _compare(work: _Push, head: str) -> Operations:
    """Compute the changes to the commit ``head``.

    Removes files that the MANIFEST.json there lists and this artifact does not have: an index that names fewer shards
    must not lie beside more of them.
    """
    remote = _files_at(work, head)
    place = work.task.target.place
    operations: Operations = []
    for file in work.task.files:
        path = work.task.folder / file.path
        stored = remote.get(place(file.path))
        if stored is None or not _is_same(stored, file.sha256, path):
            addition = _Addition(path_in_repo=place(file.path), path_or_fileobj=str(path))
            addition.upload_info.sha256 = bytes.fromhex(file.sha256)  # checked before: saves reading the file again
            operations.append(addition)
    stored = remote.get(place(MANIFEST))
    if stored is None or not _is_same(stored, digest(work.manifest), work.manifest):
        operations.append(_Addition(path_in_repo=place(MANIFEST), path_or_fileobj=work.manifest))
    if stored is not None and operations:
        ours = {file.path for file in work.task.files}
        gone = {place(path) for path in _listed_at(work, head) if path not in ours} & remote.keys()
        operations += [CommitOperationDelete(path_in_repo=path) for path in sorted(gone)]
    return operations


def _files_at(work: _Push, sha: str) -> dict[str, RepoFile]:
    tree = work.api.list_repo_tree(work.repo_id, recursive=True, revision=sha)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _listed_at(work: _Push, sha: str) -> dict[str, tuple[int, str]]:
    repository = Repository(work.repo_id, sha, {}, work.api.token if isinstance(work.api.token, str) else None)
    return listed(repository.read(work.task.target.place(MANIFEST), 0, MAX_MANIFEST_BYTES))


def _is_same(stored: RepoFile, sha256: str, content: Path | bytes) -> bool:
    """Return True if a file on the Hub has this content.

    Large files are compared by SHA-256, small ones by git's id.
    """
    if stored.lfs:
        return bool(stored.lfs.sha256 == sha256)
    return bool(stored.blob_id == (git_sha1_of(content) if isinstance(content, bytes) else git_sha1(content)))


def _upload(work: _Push, operations: Operations, emit: Emit) -> int:
    """Send the large files; small ones are sent with the commit itself. Returns the number of bytes of all files."""
    additions = [addition for addition in operations if isinstance(addition, _Addition)]
    counter = ByteProgress(sum(addition.upload_info.size for addition in additions), emit)
    for addition in additions:
        addition.counter = counter
    small = [addition for addition in additions if addition.upload_info.size < LARGE_BYTES]
    large = [addition for addition in additions if addition.upload_info.size >= LARGE_BYTES]
    for batch in (small, *([addition] for addition in large)):
        if batch:
            work.api.preupload_lfs_files(
                work.repo_id,
                additions=batch,
                revision=work.revision,
                create_pr=work.task.target.create_pr,
                free_memory=False,
            )
            counter.finish({addition.path_in_repo: addition.upload_info.size for addition in batch})
    return counter.total


def _commit(work: _Push, operations: Operations, head: str) -> tuple[str, str]:
    """Commit the files; returns the commit and the address of its page."""
    target = work.task.target
    made = _patiently(
        lambda: work.api.create_commit(
            work.repo_id,
            operations,
            commit_message=target.commit_message or "Upload a quantized model",
            commit_description=f"Manifest-SHA256: {digest(work.manifest)}\n{work.mark}",
            revision=work.revision,
            create_pr=target.create_pr,
            parent_commit=head,
        )
    )
    return made.oid, made.pr_url or made.commit_url


def _find_wrong(work: _Push, sha: str) -> str | None:
    """Return a file that differs in the commit from the proven one; None if there is none."""
    remote, place = _files_at(work, sha), work.task.target.place
    for file in work.task.files:
        stored = remote.get(place(file.path))
        if stored is None or not _is_same(stored, file.sha256, work.task.folder / file.path):
            return file.path
    return None


def _patiently(ask: Callable[[], T]) -> T:
    """Call ``ask``; if the Hub limits the rate (429), wait for the delay that it names and call ``ask`` once more."""
    try:
        return ask()
    except HfHubHTTPError as error:
        delay_s = error.response.headers.get("Retry-After", "")
        if error.response.status_code != 429 or not delay_s.isdecimal() or float(delay_s) > MAX_WAIT_S:
            raise
        time.sleep(float(delay_s))
        return ask()


class _Addition(CommitOperationAdd):
    """A file to upload that reports the number of bytes read."""

    counter: ByteProgress | None = None

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        """Open the file; count its bytes if the library asks for a progress bar (``with_tqdm``) to send it."""
        if with_tqdm and self.counter and isinstance(self.path_or_fileobj, str):
            with _Counted(self.path_or_fileobj, self.path_in_repo, self.counter) as counted:
                yield counted
        else:
            with super().as_file() as file:
                yield file


class _Counted(io.BufferedReader):
    """A file that reports its read position. A BufferedReader, because the library rewinds only those."""

    def __init__(self, path: str, name: str, counter: ByteProgress) -> None:
        super().__init__(io.FileIO(path))
        self._name = name
        self._counter = counter

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._counter.reach(self._name, self.tell())
        return data
