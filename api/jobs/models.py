"""Resolves a model reference to the model's headers. The API touches a model only here, and reads no weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api.http.deps import Context
from api.jobs.schemas import ModelRef
from api.store.accounts import hub_tokens
from api.store.accounts.audit import Caller
from api.store.queue import jobs
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.errors import ModelError
from quantcore.export.importer import READ_BY_IMPORTERS
from quantcore.hub import download as hub
from quantcore.plan import inspection
from quantcore.plan.inspection import Inspection
from quantcore.reading.model import read_model

ReadHeaders = Callable[[ModelRef], tuple[dict[str, Any], ModelHeaders]]


def reader(context: Context, caller: Caller) -> ReadHeaders:
    """Return ``read_headers`` for the models that this caller may read."""
    return lambda model: read_headers(model, context, caller)


def read_headers(model: ModelRef, context: Context, caller: Caller) -> tuple[dict[str, Any], ModelHeaders]:
    """Return (the reference to store, the headers). Raises ModelError.

    The stored reference says exactly what was read: a path as a real path, a Hub model with the commit that its
    revision stood for at this moment (``sha``), so that a retry of the job quantizes the same bytes.
    """
    if model.id is not None:
        token, named = None, {}
        if model.hub_token is not None:
            with context.sessions.begin() as session:
                sealed = hub_tokens.find_sealed(session, caller.project_id, model.hub_token)
            token = hub_tokens.unseal(context.settings.vault, sealed, caller.project_id, model.hub_token)
            named = {"hub_token": model.hub_token}
        with _pointing_at("/model/revision", "/model/id"):
            headers, sha = hub.read_headers(
                model.id, model.revision, read=lambda folder: read_model(folder).headers, needed=READ_BY_IMPORTERS,
                token=token,
            )  # fmt: skip
        return {"id": model.id, "revision": model.revision, "sha": sha} | named, headers
    assert model.path is not None  # ModelRef has one of the two
    folder = _find(model.path, "/model/path", context, caller)
    return {"path": str(folder)}, read_model(folder).headers


def inspect(model: ModelRef, context: Context, caller: Caller) -> tuple[dict[str, Any], Inspection]:
    """Return (the reference as ``read_headers`` gives it, the inspection).

    Raises ModelError whose ``field`` names the parameter.
    """
    if model.id is not None:
        with _pointing_at("/revision", "/id"):
            inspected, sha = inspection.inspect_hub(model.id, model.revision)
        return {"id": model.id, "revision": model.revision, "sha": sha}, inspected
    assert model.path is not None
    with _pointing_at("/path", "/path"):
        folder = _find(model.path, "/path", context, caller)
        return {"path": str(folder)}, inspection.inspect(folder)


def _find(path: str, field: str, context: Context, caller: Caller) -> Path:
    """Return the folder of a model as ``find_input`` does; it may be an artifact of the caller's project."""

    def is_own(folder: Path) -> bool:
        with context.sessions.begin() as session:
            return jobs.owns_artifact(session, caller.project_id, folder)

    return context.settings.find_input(path, field=field, is_own=is_own)


@contextmanager
def _pointing_at(revision: str, model: str) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        error.field = revision if error.code == "hub_revision_not_found" else model
        raise
