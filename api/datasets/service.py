"""The logic of the routes of datasets, without HTTP: take in a file, inspect it, remove it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.datasets import child, storage
from api.datasets.storage import Received
from api.http.deps import Context
from api.http.errors import Problem
from api.settings import Settings
from api.store.accounts import audit, datasets, uploads
from api.store.accounts.audit import Caller
from api.store.accounts.datasets import DatasetInUse
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.tables.jobs import Dataset, Upload
from quantcore.data.files import format_of, is_packed
from quantcore.errors import QuantError
from quantcore.hub.access import own_token
from quantcore.hub.names import is_store_url


def read_format(filename: str) -> str:
    """Return the format of a file name: ``jsonl.gz`` for ``chats.jsonl.gz``.

    Raises Problem 422 ``unsafe_path``, CalibrationError ``unsupported_format``.
    """
    if set(filename) & set("/\\:") or filename.startswith(".") or not filename.isprintable():
        raise Problem(
            422,
            "unsafe_path",
            "The file's name is not a plain name.",
            hint="Use only the file's name, without folders: chats.jsonl.gz.",
        )
    try:
        return format_of(filename) + (".gz" if is_packed(filename) else "")
    except QuantError as error:
        error.field = "/filename"
        raise


async def take_in(
    received: Received,
    name: str,
    format: str,
    column: str | None,
    caller: Caller,
    context: Context,
    upload: Upload | None = None,
) -> Dataset:
    """Examine a file that has arrived, keep it, store its row. Nothing is kept of a file with a fault.

    Raises CalibrationError for a fault in the file; Problem. An ``upload`` becomes one dataset, however often it is
    completed.
    """
    result = await child.examine(received.path, "check", context.settings, column=column)
    dataset = Dataset(
        id=new_id("dst"),
        project_id=caller.project_id,
        submitted_by=caller.key_id,
        name=name,
        format=format,
        sha256=received.sha256,
        num_bytes=received.num_bytes,
        columns=[_printable(column_name) for column_name in result["columns"]],
        text_column=result["column"],
        statistics=result["statistics"],
    )
    return await run_in_threadpool(_store, dataset, received, caller, context, upload)


def _store(dataset: Dataset, received: Received, caller: Caller, context: Context, upload: Upload | None) -> Dataset:
    with context.sessions.begin() as session:
        if upload is not None:
            locked = uploads.lock(session, caller.project_id, upload.id)
            if locked is None:
                raise no_such_upload()
            if locked.dataset_id is not None and (
                before := datasets.find(session, caller.project_id, locked.dataset_id)
            ):
                return before
        datasets.lock_file(session, received.sha256)
        storage.keep(context.settings, received, datasets.file_name(dataset))
        datasets.add(session, dataset)
        audit.note(session, caller, "dataset.upload", dataset.id)
        if upload is not None and locked is not None:
            locked.dataset_id = dataset.id
        session.flush()
        session.refresh(dataset)
    return dataset


def remove(dataset_id: str, caller: Caller, context: Context) -> None:
    """Delete a dataset, and its file if no other dataset has this content.

    Raises Problem 404, 409 ``dataset_in_use``.
    """
    with context.sessions.begin() as session:
        dataset = open_dataset(session, caller, dataset_id)
        audit.note(session, caller, "dataset.delete", dataset_id)
        try:
            datasets.delete(session, dataset)
        except DatasetInUse as error:
            raise Problem(
                409,
                "dataset_in_use",
                f"Unfinished jobs need the dataset, first {error.job_ids[0]}.",
                hint="Cancel them, or wait for them to end.",
                errors=[
                    {"parameter": "dataset_id", "detail": f"{job_id} needs it", "code": "dataset_in_use"}
                    for job_id in error.job_ids
                ],
            ) from error
    # after the commit: a row without its file would be a lie
    _remove_unneeded(context.sessions, context.settings.datasets_dir / datasets.file_name(dataset))


async def preview(dataset: Dataset, num_rows: int, context: Context) -> dict[str, Any]:
    async with context.turns.take(dataset.project_id):
        return await child.examine(path_of(dataset, context.settings), "preview", context.settings, rows=num_rows)


async def count_tokens(dataset: Dataset, model: str, revision: str, seq_len: int, context: Context) -> dict[str, Any]:
    """Count the rows in tokens of a model: a folder, or one elsewhere, of which only the tokenizer is fetched."""
    settings, file, column = context.settings, path_of(dataset, context.settings), dataset.text_column
    async with context.turns.take(dataset.project_id):
        if model.startswith("/"):
            folder = str(await run_in_threadpool(settings.find_input, model, field="/model"))
            task = {"model_dir": folder}
            return await child.examine(
                file, "tokens", settings, task=task, column=column, model=folder, seq_len=seq_len
            )
        if is_store_url(model):
            settings.check_model_url(model)
            with tempfile.TemporaryDirectory(prefix="bitfoundry-reader-") as scratch:
                copy = Path(scratch).resolve() / "model"
                asked = {"id": model, "revision": revision}
                await run_in_threadpool(context.readers.copy, asked, copy, "tokenizer")
                return await child.examine(
                    file, "tokens", settings, own=[copy], column=column, model=str(copy), seq_len=seq_len
                )
        return await child.examine(
            file,
            "tokens",
            settings,
            token=await run_in_threadpool(own_token),
            column=column,
            model_id=model,
            revision=revision,
            seq_len=seq_len,
        )


def path_of(dataset: Dataset, settings: Settings) -> Path:
    return settings.datasets_dir / datasets.file_name(dataset)


async def find_dataset(context: Context, caller: Caller, dataset_id: str) -> Dataset:
    """Return the dataset. Raises Problem 404."""

    def find() -> Dataset:
        with context.sessions.begin() as session:
            return open_dataset(session, caller, dataset_id)

    return await run_in_threadpool(find)


def open_dataset(session: Session, caller: Caller, dataset_id: str) -> Dataset:
    """Return the dataset. Raises Problem 404."""
    dataset = datasets.find(session, caller.project_id, dataset_id)
    if dataset is None:
        raise Problem(404, "dataset_not_found", "There is no such dataset.")
    return dataset


def no_such_upload() -> Problem:
    return Problem(
        404, "upload_not_found", "There is no such upload.", hint=f"It is kept for {uploads.LIFETIME_S / 3600:g} hours."
    )


def find_litter(settings: Settings, sessions: Sessions) -> list[Path]:
    """Return the files that killed processes have left: a day old, and without a row."""
    old = [*storage.old_files(settings)]
    named = {path: path.name.partition(".") for path in old if path.parent == settings.datasets_dir}
    with sessions.begin() as session:
        needed = {path for path, (sha256, _, format) in named.items() if datasets.has_file(session, sha256, format)}
        upload_ids = uploads.find_known(session, [path.name for path in old if path.is_dir()])
    return [path for path in old if path not in needed and path.name not in upload_ids]


def remove_litter(settings: Settings, sessions: Sessions) -> None:
    """Remove the files that ``find_litter`` finds."""
    for path in find_litter(settings, sessions):
        if path.parent == settings.datasets_dir:
            _remove_unneeded(sessions, path)
        elif path.is_dir():
            storage.remove_parts(settings, path.name)
        else:
            path.unlink(missing_ok=True)


def _remove_unneeded(sessions: Sessions, path: Path) -> None:
    sha256, _, format = path.name.partition(".")
    with sessions.begin() as session:
        datasets.lock_file(session, sha256)
        if not datasets.has_file(session, sha256, format):
            path.unlink(missing_ok=True)


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in name)[:200]
