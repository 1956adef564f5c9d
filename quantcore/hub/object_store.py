"""A model in an object store: Amazon S3 and its like, Google Cloud Storage, Azure Blob Storage. No torch.

Stores know no commits. ``sha`` is a digest of the names, sizes and entity tags (ETag) of all files: once a job has it,
a model whose files were replaced is refused. The keys and the server's address are those of the environment, under the
names of each store's own tools (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_NAME ...), or come from the machine's role.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantcore.checkpoint.besides import refuse_adapter
from quantcore.config.time_limits import STORE_CONNECT_S, STORE_TRANSFER_S
from quantcore.errors import DISK_FULL, ModelError, QuantError
from quantcore.events import Emit
from quantcore.hub.download_progress import ByteCounter
from quantcore.hub.listing import MANIFEST, NUM_CONNECTIONS, Listing, RemoteFile, check_manifest, is_wanted
from quantcore.hub.names import store_name

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

KEY_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")
"""Variables with these prefixes hold a store's address and keys. Only a process that talks to a store gets them."""
PART_BYTES = 4 << 20
"""The size of one request; ``NUM_CONNECTIONS`` requests are in memory at once."""
MAX_FILES = 10_000
MAX_MANIFEST_BYTES = 16 << 20
MAX_RETRIES = 5


@dataclass(frozen=True)
class StoredFile(RemoteFile):
    """A file in a store. The store gives each content of a file another ``etag``."""

    etag: str


@dataclass(frozen=True)
class StoredModel(Listing):
    """The files below a URL at one moment."""

    name: str
    sha: str
    stored: Mapping[str, StoredFile]

    @property
    def files(self) -> Mapping[str, StoredFile]:
        return self.stored

    def read(self, name: str, begin: int, num_bytes: int) -> bytes:
        end = min(begin + num_bytes, self.files[name].size)
        with explained(self.name):
            return bytes(self._read(open_store(self.name), name, begin, end))

    def download(self, names: list[str], emit: Emit, folder: Path | None = None) -> Path:
        """See ``Listing``. Files that are there already are kept. Raises ModelError ``store_*``, ``model_changed``."""
        folder = folder or cache_folder() / self.sha / store_name(self.name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        counter = ByteCounter(sum(self.files[name].size for name in names), emit)
        store, num_bytes = open_store(self.name), 0
        with explained(self.name):
            for name in names:
                if not (folder / name).exists():
                    for num_read in self._download(store, name, folder / name):
                        counter.move(num_bytes + num_read)
                num_bytes += self.files[name].size
                counter.move(num_bytes)
        if MANIFEST in self.files:
            check_manifest(folder, names, self.read(MANIFEST, 0, MAX_MANIFEST_BYTES))
        counter.finish()
        return folder

    def _download(self, store: ObjectStore, name: str, path: Path) -> Iterator[int]:
        """Fetch one file in parts, and yield the number of bytes that are there. Its name appears when it is whole."""
        size = self.files[name].size
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with partial.open("wb") as file, ThreadPoolExecutor(NUM_CONNECTIONS) as pool:  # it ends before the file does
            file.truncate(size)

            def fetch(begin: int) -> int:
                part = self._read(store, name, begin, min(begin + PART_BYTES, size))
                return os.pwrite(file.fileno(), part, begin)

            num_read = 0
            for written in pool.map(fetch, range(0, size, PART_BYTES)):
                num_read += written
                yield num_read
            os.fsync(file.fileno())
        partial.replace(path)

    def _read(self, store: ObjectStore, name: str, begin: int, end: int) -> bytes | Bytes:
        """Read the bytes of a file from ``begin`` to ``end``."""
        import obstore

        if begin >= end:
            return b""
        answer = obstore.get(store, name, options={"range": (begin, end)})
        if answer.meta["size"] != self.files[name].size or _tag(answer.meta) != self.files[name].etag:
            raise _changed(self.name)
        part = answer.bytes()
        if len(part) != end - begin:
            raise ConnectionError("the answer ends early")
        return part


def list_store(url: str, sha: str = "") -> StoredModel:
    """List a model's files. Raises ModelError ``store_*``, and ``model_changed`` unless they are those of ``sha``.

    Besides the folder itself, those of sentence-transformers' modules and of templates are looked into.
    """
    import obstore

    with explained(url):
        store = open_store(url)
        level = obstore.list_with_delimiter(store)
        found = list(level["objects"])
        inner = [prefix.rpartition("/")[2] for prefix in level["common_prefixes"]]
        for folder in inner[:MAX_FILES]:
            if is_wanted(f"{folder}/config.json") or is_wanted(f"{folder}/model.jinja"):
                found += obstore.list_with_delimiter(store, folder)["objects"]
    if len(found) > MAX_FILES:
        raise ModelError(
            f"There are {len(found)} files in {url}: this is not the folder of one model.",
            code="store_not_found",
            hint="Name the folder that holds config.json.",
        )
    files = {entry["path"]: StoredFile(entry["size"], _tag(entry)) for entry in found if is_wanted(entry["path"])}
    if not files:
        raise ModelError(
            f"There is no model at {url}: there are no files.",
            code="store_not_found",
            hint="Name the folder that holds config.json, as scheme://bucket/folder.",
        )
    model = StoredModel(url.rstrip("/"), _digest(files), files)
    if sha and sha != model.sha:
        raise _changed(url)
    refuse_adapter(files)
    return model


def open_store(url: str) -> ObjectStore:
    """Return the client of the folder at ``url``. Every call of it ends in time."""
    from obstore.store import from_url

    return from_url(
        url.rstrip("/"),
        client_options={
            "allow_http": address().startswith("http://"),
            "connect_timeout": timedelta(seconds=STORE_CONNECT_S),
            "timeout": timedelta(seconds=STORE_TRANSFER_S),
        },
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=STORE_TRANSFER_S)},
    )


def key_variables() -> dict[str, str]:
    """Return this process's variables with addresses and keys of stores."""
    return {name: value for name, value in os.environ.items() if name.startswith(KEY_PREFIXES)}


def key_files() -> list[Path]:
    """Return the files that those variables name: keys, or tokens of a cluster that stand for keys."""
    named = (value for name, value in key_variables().items() if name.endswith(("_FILE", "_CREDENTIALS")))
    return [path for path in map(Path, named) if path.is_file()]


def address() -> str:
    """Return the address of a server with the interface of S3 other than Amazon's, "" if none is set."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def cache_folder() -> Path:
    """Return the folder with the models that commands on this machine have downloaded, by their ``sha``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bitfoundry" / "stored-models"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn errors of a store raised inside into ModelError; errors of ours pass unchanged.

    Only their kind goes into ours: the text of a store's error may hold a signed address.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except QuantError:
        raise
    except (BaseError, OSError, ValueError) as error:
        raise explain(error, url) from error


class Fault(Enum):
    """The kinds of faults of a store or a disk."""

    NOT_FOUND = "not_found"
    FORBIDDEN = "forbidden"
    FULL = "full"
    UNREACHABLE = "unreachable"


def fault_of(error: Exception) -> Fault:
    """Return the kind of an error of obstore, of the connection, or of the disk.

    obstore has classes for some answers of a store; others are told by their codes, as servers with the interface of S3
    send them.
    """
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    said = str(error) if isinstance(error, BaseError) else ""
    if (isinstance(error, OSError) and error.errno in DISK_FULL) or "QuotaExceeded" in said:
        return Fault.FULL
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in said or "ContainerNotFound" in said:
        return Fault.NOT_FOUND
    if isinstance(error, PermissionError | PermissionDeniedError | UnauthenticatedError) or "403 Forbidden" in said:
        return Fault.FORBIDDEN
    return Fault.UNREACHABLE


def explain(error: Exception, url: str) -> ModelError:
    """Return our error for an error of obstore, of the connection, or of the disk."""
    if isinstance(error, PermissionError):  # obstore's own is another class
        return ModelError(
            f"The folder for models from object stores cannot be written: {cache_folder()}.",
            code="cache_not_writable",
            hint="Set XDG_CACHE_HOME to a folder that you can write to.",
        )
    fault = fault_of(error)
    if fault is Fault.NOT_FOUND:
        return ModelError(
            f"There is no bucket, or no file, at {url}.",
            code="store_not_found",
            hint="Name the folder that holds config.json, as scheme://bucket/folder.",
        )
    if fault is Fault.FORBIDDEN:
        return ModelError(
            f"The store refuses to show {url}.",
            code="store_forbidden",
            hint="Give the keys of an account that may list and read this folder, under the names of the store's own "
            "tools: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, or "
            "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY.",
        )
    if fault is Fault.FULL:
        return ModelError(f"The disk is full: the model at {url} does not fit.", code="disk_full", retryable=True)
    return ModelError(
        f"The object store does not answer, or with an invalid answer, for {url} ({type(error).__name__}).",
        code="store_unreachable",
        hint="Try again in a moment. The address of a server other than the store's own is AWS_ENDPOINT_URL, its "
        "region AWS_REGION.",
        retryable=True,
    )


def _changed(url: str) -> ModelError:
    return ModelError(
        f"The files at {url} are no longer those that were asked for.",
        code="model_changed",
        hint="Submit the job again to quantize the model as it is now.",
    )


def _digest(files: Mapping[str, StoredFile]) -> str:
    lines = "".join(f"{name}\0{file.size}\0{file.etag}\n" for name, file in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:40]


def _tag(entry: Mapping[str, Any]) -> str:
    """Return the entity tag of a file. Some servers quote it in some answers."""
    return (entry["e_tag"] or "").strip('"')
