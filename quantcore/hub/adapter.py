"""Brings the PEFT adapter of a job onto this machine, and checks that it is the one that was asked for. No torch."""

from __future__ import annotations

from pathlib import Path

from quantcore.checkpoint.adapter import WEIGHTS, adapter_digest, check_adapter_files
from quantcore.checkpoint.besides import ADAPTER
from quantcore.config.task import AdapterSource, Task
from quantcore.errors import ModelError
from quantcore.events import Emit, PhaseStarted
from quantcore.hub.names import is_model_id
from quantcore.hub.repository import Repository, list_files

_SIDE_FILES = ("chat_template.jinja", "tokenizer_config.json")


def resolve_adapter(adapter_id: str, revision: str) -> str:
    """Return the commit that a revision of an adapter on the Hub names now. Raises ModelError ``hub_*``."""
    return _listed(adapter_id, revision).sha


def _find(source: AdapterSource, emit: Emit, token: str | None) -> Path:
    if source.folder is not None:
        return source.folder
    emit(PhaseStarted("download"))
    listing = _listed(source.id, source.revision, token)
    return listing.download([name for name in (ADAPTER, WEIGHTS, *_SIDE_FILES) if name in listing.files], emit)


def with_adapter(task: Task, emit: Emit, token: str | None = None) -> Task:
    """Return ``task`` with the folder and the digest of its adapter, if it has one.

    Raises ModelError: ``hub_*``, ``no_adapter``, ``adapter_changed`` for files with another digest.
    """
    if task.adapter is None:
        return task
    folder, digest = checked(task.adapter, emit, token)
    return task.model_copy(update={"adapter": task.adapter.model_copy(update={"folder": folder, "digest": digest})})


def checked(source: AdapterSource, emit: Emit, token: str | None = None) -> tuple[Path, str]:
    """Return the folder of an adapter and the digest of its files. Raises as ``with_adapter``."""
    folder = _find(source, emit, token)
    check_adapter_files(folder)
    digest = adapter_digest(folder)
    if source.digest not in ("", digest):
        raise ModelError(
            f"The adapter in {folder} is not the same as before: its digest is {digest}, not {source.digest}.",
            code="adapter_changed",
            hint="Put back the files with that digest, or start a new job.",
        )
    return folder, digest


def _listed(adapter_id: str, revision: str, token: str | None = None) -> Repository:
    if not is_model_id(adapter_id):
        raise ModelError(
            f"There is no adapter at {adapter_id[:200]}.",
            code="no_adapter",
            hint="Name a folder with adapter_config.json, or an adapter on the Hub (org/name).",
        )
    listing = list_files(adapter_id, revision, token)
    if missing := [name for name in (ADAPTER, WEIGHTS) if name not in listing.files]:
        raise ModelError(
            f"'{adapter_id}' on the Hub has no {missing[0]}: it is no PEFT adapter in safetensors.",
            code="no_adapter",
            hint="Name the repository of the adapter itself. Pickled weights (adapter_model.bin) are never read.",
        )
    return listing
