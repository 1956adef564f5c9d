"""A model's repository on the Hugging Face Hub at one commit. No torch.

A revision is resolved to its commit once; all later requests name the commit, and every downloaded file is compared
with the hash that the commit records. The token, the endpoint and the cache folder are huggingface_hub's own: HF_TOKEN,
HF_ENDPOINT, HF_HOME.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quantcore.checkpoint.artifact import sha256
from quantcore.checkpoint.besides import refuse_adapter
from quantcore.config.time_limits import HUB_S
from quantcore.errors import ModelError
from quantcore.events import Emit
from quantcore.hub.download_progress import ByteCounter
from quantcore.hub.listing import NUM_CONNECTIONS, Listing, RemoteFile, is_wanted
from quantcore.hub.names import is_model_id
from quantcore.hub.session import hub_api, limit_waits

_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class CommittedFile(RemoteFile):
    """A file of a commit. ``sha256`` is set for large files (LFS), ``git_sha1`` (a git blob's id) for the others."""

    git_sha1: str
    sha256: str | None


@dataclass(frozen=True)
class Repository(Listing):
    """A repository at the commit ``sha``, and the token that gives access to it."""

    name: str
    sha: str
    committed: Mapping[str, CommittedFile]
    token: str | None = field(default=None, repr=False)

    @property
    def files(self) -> Mapping[str, CommittedFile]:
        return self.committed

    def read(self, name: str, begin: int, num_bytes: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        from quantcore.hub.hub_errors import explained

        limit_waits()
        # Identity: a compressed response has no ranges.
        range_headers = {"Range": f"bytes={begin}-{begin + num_bytes - 1}", "Accept-Encoding": "identity"}
        headers = build_hf_headers(token=self.token) | range_headers
        url = hf_hub_url(self.name, name, revision=self.sha)
        parts: list[bytes] = []
        with (
            explained(self.name, self.sha),
            get_session().stream("GET", url, headers=headers, timeout=HUB_S) as response,
        ):
            hf_raise_for_status(response)
            if begin and response.status_code != 206:
                raise ValueError("the answer is not the requested range")
            for part in response.iter_bytes():
                parts.append(part)
                if response.num_bytes_downloaded >= num_bytes:
                    break
        return b"".join(parts)[:num_bytes]

    def download(self, names: list[str], emit: Emit, folder: Path | None = None) -> Path:
        """See ``Listing``. A dropped connection is resumed where it broke. Raises ModelError: ``hub_*``."""
        from huggingface_hub import snapshot_download

        from quantcore.hub.hub_errors import explained

        limit_waits()
        counter = ByteCounter(sum(self.files[name].size for name in names), emit)
        with explained(self.name, self.sha):
            found = Path(
                snapshot_download(
                    self.name,
                    revision=self.sha,
                    allow_patterns=[glob.escape(name) for name in names],
                    max_workers=NUM_CONNECTIONS,
                    tqdm_class=counter.bar_class(),
                    token=self.token,
                    local_dir=folder,
                )
            )
            for name in names:
                check_downloaded(found / name, self.files[name])
        counter.finish()
        return found


def list_repository(model_id: str, revision: str, token: str | None = None) -> Repository:
    """List the files of a model at a commit. Raises as ``list_files``, and ModelError for an adapter."""
    listing = list_files(model_id, revision, token)
    refuse_adapter(dict(listing.files))
    return listing


def list_files(model_id: str, revision: str, token: str | None = None) -> Repository:
    """List the files of a commit, in one request. Raises ModelError ``invalid_model_id``, ``hub_*``."""
    if not is_model_id(model_id):
        raise ModelError(
            f"'{model_id[:100]}' is not the id of a model on the Hub.",
            code="invalid_model_id",
            hint="An id looks like org/name: letters, digits, '-', '_' and '.'.",
        )

    from quantcore.hub.hub_errors import explained

    with explained(model_id, revision):
        info = hub_api(token).model_info(model_id, revision=revision, files_metadata=True, timeout=HUB_S)
        if info.sha is None or not _SHA.fullmatch(info.sha):
            raise ValueError("the answer names no commit")
        files = {}
        for entry in info.siblings or ():
            if is_wanted(entry.rfilename):
                digest = entry.lfs.sha256 if entry.lfs else None
                files[entry.rfilename] = CommittedFile(entry.size or 0, entry.blob_id or "", digest)
    return Repository(model_id, info.sha, files, token)


def check_downloaded(path: Path, file: CommittedFile) -> None:
    """Compare a file's size and hash with the commit's, since huggingface_hub checks only the size.

    Raises ModelError, and removes a file that differs.
    """
    if not path.is_file():  # the library falls back to its cache when the Hub is away
        raise ModelError(
            f"{path.name} could not be downloaded.",
            code="hub_unreachable",
            hint="Try again in a moment.",
            retryable=True,
        )
    digest = sha256(path) if file.sha256 else git_sha1(path)
    if path.stat().st_size != file.size or digest != (file.sha256 or file.git_sha1):
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ModelError(
            f"{path.name} differs from the file on the Hub (wrong hash).",
            code="hub_hash_mismatch",
            hint="It was removed from the cache. Try again.",
            retryable=True,
        )


def git_sha1(path: Path) -> str:
    """Return git's id of a file's content: SHA-1 of ``blob <size>`` NUL content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def git_sha1_of(data: bytes) -> str:
    """Return the ``git_sha1`` of ``data``."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
