"""Models on the Hugging Face Hub: metadata without weights, and the download. No torch.

A repository is a stranger's. Only plain files in its root that belong to a language model are fetched: config,
tokenizer, safetensors. Pickled weights and Python code are never fetched. A revision is resolved to its commit once;
all later requests name the commit, and every downloaded file is compared with the hash that the commit records.

The token, the endpoint and the cache folder are huggingface_hub's own: HF_TOKEN, HF_ENDPOINT, HF_HOME.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from quantcore.checkpoint.artifact import sha256
from quantcore.checkpoint.besides import refuse_adapter, weights_without_index
from quantcore.checkpoint.headers import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    ModelHeaders,
    read_local,
    read_safetensors_header,
)
from quantcore.checkpoint.side_files import MODULES, SIDE_FILES, TEMPLATES
from quantcore.config.task import Task
from quantcore.config.time_limits import HUB_S
from quantcore.errors import ModelError
from quantcore.events import Emit, PhaseStarted
from quantcore.hub.download_progress import ByteCounter
from quantcore.hub.session import hub_api, limit_waits

CONFIG = "config.json"
CARD = "README.md"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
MAX_SHARDS = 2000
MAX_SPANS = 4000  # spans of small tensors that a plan needs; each is a request
MAX_NEEDED_BYTES = 64 << 20
LARGEST_GAP = 100_000  # bytes between two tensors that one request still fetches together
MAX_CARD_BYTES = 64 << 10
MAX_FETCHED_CARD_BYTES = 1 << 20  # the card's front matter goes into the card of the quantized model
MAX_TOKENIZER_BYTES = 256 << 20
NUM_CONNECTIONS = 8
TOKEN: ContextVar[str | None] = ContextVar("TOKEN", default=None)
"""Token for private models and datasets that ``fetch`` received. It is never in an environment variable or a file."""
FIRST_BYTES = 100_000  # holds the whole header of nearly every file, so that one request is enough

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_MODEL_ID = re.compile(f"{_PART}/{_PART}")
_SHA = re.compile(r"[0-9a-f]{40}")
_OF_MODULE = re.compile(r"\d+_\w{1,50}/(config\.json|model\.safetensors)")  # see ``artifact.module_files``
_TEMPLATE = re.compile(rf"{TEMPLATES}/[\w-][\w.-]{{0,100}}\.jinja")  # see ``artifact.inner_files``


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit. ``sha256`` is set for large files (LFS), ``git_sha1`` (a git blob's id) for the others."""

    size: int
    git_sha1: str
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """The files in the root of a model's repository at one commit, by name, and the token that gives access to it.

    The files of sentence-transformers' modules, such as ``1_Pooling/config.json``, are among them.
    """

    model_id: str
    sha: str
    files: dict[str, RemoteFile]
    token: str | None = field(default=None, repr=False)


def is_model_id(text: str) -> bool:
    """Return True for ``org/name`` in the Hub's syntax; never for a path or an address."""
    return _MODEL_ID.fullmatch(text) is not None and not re.search(r"--|\.\.|\.git$", text)


def find_local(name: str) -> Path | None:
    """Return the folder or file ``name``; None for a model on the Hub. Raises ModelError ``model_not_found``."""
    path = Path(name)
    if path.exists():
        return path
    if is_model_id(name):
        return None
    raise ModelError(
        f"There is no model at {name}.",
        code="model_not_found",
        hint="Use a folder with config.json, a GGUF file, or a model on the Hub: org/name.",
    )


def resolve(model_id: str, revision: str = "main") -> str:
    """Return the commit that a branch, tag or commit names now. Raises ModelError (see ``hub.hub_errors``)."""
    return _list(model_id, revision).sha


def read_headers(
    model_id: str,
    revision: str = "main",
    *,
    read: Callable[[Path], ModelHeaders] = read_local,
    needed: re.Pattern[str] | None = None,
    token: str | None = None,
) -> tuple[ModelHeaders, str]:
    """Return a model's headers and its commit, with a few requests of some kB and without weights.

    ``read`` gets a folder with the true config, headers and sizes, zeros for weights, and the tensors that have
    ``needed`` in their names. ``token`` replaces huggingface_hub's own. Raises ModelError: ``invalid_model_id``,
    ``hub_*`` (see ``hub.hub_errors``), and any that ``read`` raises.
    """
    with outline(model_id, revision, needed=needed, token=token) as (folder, sha):
        return read(folder), sha


@contextmanager
def outline(
    model_id: str, revision: str = "main", *, needed: re.Pattern[str] | None = None, token: str | None = None
) -> Iterator[tuple[Path, str]]:
    """Make a temporary copy of the model's folder with holes for weights; yields the folder and the commit.

    Names, sizes, config and headers are true; so are the start of the card (README.md) and the tensors that have
    ``needed`` in their names. Raises the errors of ``read_headers``. In a ModelError raised inside, the name of the
    folder is replaced by the model's.
    """
    listing = _list(model_id, revision, token)
    with tempfile.TemporaryDirectory(prefix="bf-hub-") as scratch:
        folder = Path(scratch)
        try:
            names = _draw_outline(listing, folder)
            if needed is not None:
                _fill_in(listing, folder, names, needed)
            yield folder, listing.sha
        except ModelError as error:
            error.message = error.message.replace(scratch, f"'{model_id}'")  # the folder is ours, not the user's
            raise


def fetch(task: Task, emit: Emit) -> Task:
    """Return the task with its model in a folder, downloaded if necessary. Raises the errors of ``download``."""
    if task.token_on_stdin:
        TOKEN.set(sys.stdin.readline().strip() or None)
    if task.model_dir is not None:
        return task
    emit(PhaseStarted("download"))
    return task.model_copy(update={"model_dir": download(task.model_id, task.revision, emit, token=TOKEN.get())})


def download(model_id: str, sha: str, emit: Emit, *, token: str | None = None) -> Path:
    """Download the files that quantization needs of commit ``sha`` into the Hub's cache, check them, return the folder.

    A dropped connection is resumed where it broke. Raises ModelError: ``hub_*``; retryable
    ``hub_hash_mismatch`` if a file is not the commit's (it is removed, so that the next try fetches it again).
    """
    listing = _list(model_id, sha, token)
    return _download(listing, _files_to_download(listing, _read_index(listing)), emit)


def download_tokenizer(model_id: str, revision: str = "main", *, token: str | None = None) -> Path:
    """Download a model's config and tokenizer without weights, and return the folder.

    Raises the errors of ``download``, and ModelError ``config_implausible`` for files that are too large.
    """
    listing = _list(model_id, revision, token)
    names = [name for name in _files_to_download(listing, b"") if not name.endswith(".safetensors") and name != CARD]
    if sum(listing.files[name].size for name in names) > MAX_TOKENIZER_BYTES:
        raise ModelError(
            f"The tokenizer of '{model_id}' is larger than {MAX_TOKENIZER_BYTES >> 20} MiB.", code="config_implausible"
        )
    return _download(listing, names, lambda event: None)


def _download(listing: Listing, names: list[str], emit: Emit) -> Path:
    from huggingface_hub import snapshot_download

    from quantcore.hub.hub_errors import explained

    limit_waits()
    counter = ByteCounter(sum(listing.files[name].size for name in names), emit)
    with explained(listing.model_id, listing.sha):
        folder = Path(
            snapshot_download(
                listing.model_id,
                revision=listing.sha,
                allow_patterns=[glob.escape(name) for name in names],
                max_workers=NUM_CONNECTIONS,
                tqdm_class=counter.bar_class(),
                token=listing.token,
            )
        )
        for name in names:
            check_downloaded(folder / name, listing.files[name])
    counter.finish()
    return folder


def _list(model_id: str, revision: str, token: str | None = None) -> Listing:
    """List the files of a commit, in one request."""
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
            name = entry.rfilename
            if _is_plain(name) or _OF_MODULE.fullmatch(name) or _TEMPLATE.fullmatch(name):
                digest = entry.lfs.sha256 if entry.lfs else None
                files[entry.rfilename] = RemoteFile(entry.size or 0, entry.blob_id or "", digest)
    refuse_adapter(files)
    return Listing(model_id, info.sha, files, token)


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..") and "\\" not in name and name.isprintable()


def _draw_outline(listing: Listing, folder: Path) -> list[str]:
    """Write the model into ``folder`` with holes for weights, and return the names of the weight files.

    Names, sizes and headers are true, so that the checks of a local folder work. The files are sparse: a terabyte of
    holes takes no disk.
    """
    index = _read_index(listing)
    if CONFIG in listing.files:
        _write_outline(folder / CONFIG, _read_start(listing, CONFIG, MAX_CONFIG_BYTES), listing.files[CONFIG])
    if INDEX in listing.files:
        _write_outline(folder / INDEX, index, listing.files[INDEX])
    if CARD in listing.files:
        _write_outline(folder / CARD, _read_start(listing, CARD, MAX_CARD_BYTES), listing.files[CARD])
    for name in listing.files:
        if matches(name, PICKLES):
            (folder / name).touch()  # only the name, for the error about a model that has only pickles
    names = _weights(listing, index)
    if len(names) > MAX_SHARDS:
        raise ModelError(f"The model has {len(names)} files of weights.", code="header_too_large")
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        try:
            for name, start in zip(names, pool.map(lambda name: _read_header(listing, name), names), strict=True):
                _write_outline(folder / name, start, listing.files[name])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return names


def _fill_in(listing: Listing, folder: Path, names: list[str], needed: re.Pattern[str]) -> None:
    """Fetch the tensors with ``needed`` in their names into their files; neighbours share a request."""
    spans: list[tuple[str, int, int]] = []
    for file in names:
        headers = read_safetensors_header(folder / file)
        small = sorted((header.begin, header.end) for name, header in headers.items() if needed.search(name))
        for begin, end in small:
            if spans and spans[-1][0] == file and begin - spans[-1][2] < LARGEST_GAP:
                spans[-1] = (file, spans[-1][1], end)
            else:
                spans.append((file, begin, end))
    total_bytes = sum(end - begin for _, begin, end in spans)
    if len(spans) > MAX_SPANS or total_bytes > MAX_NEEDED_BYTES:
        raise ModelError(
            f"Planning for this model would need to download {total_bytes >> 20} MiB in {len(spans)} pieces.",
            code="header_too_large",
            hint="Download it and use its folder.",
        )
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        try:
            parts = pool.map(lambda span: read_range(listing, span[0], span[1], span[2] - span[1]), spans)
            for (file, begin, _), part in zip(spans, parts, strict=True):
                with (folder / file).open("r+b") as stream:
                    stream.seek(begin)
                    stream.write(part)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write_outline(path: Path, start: bytes, file: RemoteFile) -> None:
    with path.open("wb") as stream:
        stream.write(start[: file.size])
        stream.truncate(file.size)


def _read_header(listing: Listing, name: str) -> bytes:
    """Read a safetensors file up to the end of its header (less if its length is implausible)."""
    start = _read_start(listing, name, FIRST_BYTES)
    needed = 8 + int.from_bytes(start[:8], "little")
    if len(start) < needed <= min(listing.files[name].size, 8 + MAX_HEADER_BYTES):
        start = _read_start(listing, name, needed)
    return start[:needed]


def _read_index(listing: Listing) -> bytes:
    return _read_start(listing, INDEX, MAX_INDEX_BYTES) if INDEX in listing.files else b""


def _read_start(listing: Listing, name: str, num_bytes: int) -> bytes:
    """Read at most the first ``num_bytes`` of a file, even if the server sends more."""
    if listing.files[name].size == 0:
        return b""  # an empty range cannot be requested
    return read_range(listing, name, 0, num_bytes)


def read_range(listing: Listing, name: str, begin: int, num_bytes: int) -> bytes:
    """Read at most ``num_bytes`` of a file from ``begin`` on."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    from quantcore.hub.hub_errors import explained

    limit_waits()
    # Identity: a compressed response has no ranges.
    range_headers = {"Range": f"bytes={begin}-{begin + num_bytes - 1}", "Accept-Encoding": "identity"}
    headers = build_hf_headers(token=listing.token) | range_headers
    url = hf_hub_url(listing.model_id, name, revision=listing.sha)
    parts: list[bytes] = []
    with (
        explained(listing.model_id, listing.sha),
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


def _files_to_download(listing: Listing, index: bytes) -> list[str]:
    """Select the files to download: config, index, card, side files, weights; never a pickle."""
    side = (name for name in listing.files if matches(name, SIDE_FILES) and not matches(name, PICKLES))
    card = (CARD,) if CARD in listing.files and listing.files[CARD].size <= MAX_FETCHED_CARD_BYTES else ()
    top = (name for name in (CONFIG, INDEX, *card) if name in listing.files)
    of_modules = filter(_OF_MODULE.fullmatch, listing.files if MODULES in listing.files else ())
    templates = filter(_TEMPLATE.fullmatch, listing.files)
    return sorted({*top, *side, *of_modules, *templates, *_weights(listing, index)})


def _weights(listing: Listing, index: bytes) -> list[str]:
    """Return the safetensors files that ``read_local`` will read: those of the index if there is one, else all.

    Index entries that are not files in the root are left out here; ``read_local`` rejects such an index.
    """
    names = [name for name in listing.files if name.endswith(".safetensors") and _is_plain(name)]
    if INDEX not in listing.files:
        return weights_without_index(sorted(names))
    try:
        named = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return sorted(named & set(names))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a file's name matches one of the shell patterns, case-sensitively."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_downloaded(path: Path, file: RemoteFile) -> None:
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
