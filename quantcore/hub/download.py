"""Models on the Hugging Face Hub or in an object store: metadata without weights, and the download. No torch.

Such a model is a stranger's. Only plain files in its root that belong to a language model are fetched: config,
tokenizer, safetensors. Pickled weights and Python code are never fetched. What was asked for is resolved once, to a
commit of the Hub or a digest of a store's listing (``sha``); all later requests name it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from quantcore.checkpoint.headers import ModelHeaders, read_local
from quantcore.config.task import Task
from quantcore.errors import ModelError
from quantcore.events import Emit, PhaseStarted
from quantcore.hub.listing import CARD, Listing, files_to_download
from quantcore.hub.names import is_store_url
from quantcore.hub.outline import draw_outline

MAX_TOKENIZER_BYTES = 256 << 20
MAIN = "main"
TOKEN: ContextVar[str | None] = ContextVar("TOKEN", default=None)
"""Token for private models and datasets that ``fetch`` received. It is never in an environment variable or a file."""

_SHA = re.compile("[0-9a-f]{40}")


def resolve(model_id: str, revision: str = MAIN) -> str:
    """Return the commit that a branch, tag or commit names now; of a store, the digest of its files.

    Raises ModelError (see ``hub.hub_errors`` and ``hub.object_store``).
    """
    return list_files(model_id, revision).sha


def read_headers(
    model_id: str,
    revision: str = MAIN,
    *,
    read: Callable[[Path], ModelHeaders] = read_local,
    needed: re.Pattern[str] | None = None,
    token: str | None = None,
) -> tuple[ModelHeaders, str]:
    """Return a model's headers and its commit, with a few requests of some kB and without weights.

    ``read`` gets a folder with the true config, headers and sizes, zeros for weights, and the tensors that have
    ``needed`` in their names. ``token`` replaces huggingface_hub's own. Raises ModelError: ``invalid_model_id``,
    ``hub_*``, ``store_*``, and any that ``read`` raises.
    """
    with outline(model_id, revision, needed=needed, token=token) as (folder, sha):
        return read(folder), sha


@contextmanager
def outline(
    model_id: str, revision: str = MAIN, *, needed: re.Pattern[str] | None = None, token: str | None = None
) -> Iterator[tuple[Path, str]]:
    """Make a temporary copy of the model's folder with holes for weights; yields the folder and the commit.

    Names, sizes, config and headers are true; so are the start of the card (README.md) and the tensors that have
    ``needed`` in their names. Raises the errors of ``read_headers``. In a ModelError raised inside, the name of the
    folder is replaced by the model's.
    """
    listing = list_files(model_id, revision, token)
    with tempfile.TemporaryDirectory(prefix="bf-hub-") as scratch:
        folder = Path(scratch)
        try:
            draw_outline(listing, folder, needed)
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


def download(model_id: str, sha: str, emit: Emit, *, token: str | None = None, folder: Path | None = None) -> Path:
    """Download the files that quantization needs of ``sha``, check them, and return their folder.

    It is ``folder``, or one in a cache: the Hub's, or that of ``hub.object_store``. Raises ModelError: ``hub_*``,
    ``store_*``; retryable ``hub_hash_mismatch`` if a file is not the commit's (it is removed, so that the next try
    fetches it again).
    """
    listing = list_files(model_id, sha, token)
    return listing.download(files_to_download(listing, listing.read_index()), emit, folder)


def download_tokenizer(
    model_id: str, revision: str = MAIN, *, token: str | None = None, folder: Path | None = None
) -> Path:
    """Download a model's config and tokenizer without weights, and return the folder.

    Raises the errors of ``download``, and ModelError ``config_implausible`` for files that are too large.
    """
    listing = list_files(model_id, revision, token)
    names = [name for name in files_to_download(listing, b"") if not name.endswith(".safetensors") and name != CARD]
    if sum(listing.files[name].size for name in names) > MAX_TOKENIZER_BYTES:
        raise ModelError(
            f"The tokenizer of '{model_id}' is larger than {MAX_TOKENIZER_BYTES >> 20} MiB.", code="config_implausible"
        )
    return listing.download(names, lambda event: None, folder)


def list_files(model_id: str, revision: str, token: str | None = None) -> Listing:
    """List a model's files: of a commit on the Hub, or of a store as long as they are those of ``revision``.

    Raises ModelError: ``invalid_model_id``, ``hub_*``, ``store_*``, ``model_changed``.
    """
    if not is_store_url(model_id):
        from quantcore.hub.repository import list_repository

        return list_repository(model_id, revision, token)

    from quantcore.hub.object_store import list_store

    if revision != MAIN and not _SHA.fullmatch(revision):
        raise ModelError(
            f"'{revision[:100]}' is no revision of {model_id}: an object store has no branches.",
            code="store_has_no_revisions",
            hint="Omit the revision, or give the one that a report or a job shows (40 hex digits).",
        )
    return list_store(model_id, "" if revision == MAIN else revision)
