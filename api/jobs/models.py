"""Resolves a model reference, and lets a confined process read the model. The API itself opens no file of a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends

from api.http.deps import Context, ContextDep
from api.http.security import authenticate
from api.jobs.schemas import ModelRef
from api.store.accounts import hub_tokens
from api.store.accounts.audit import Caller
from api.store.queue import jobs
from quantcore.config.job_spec import JobSpec
from quantcore.errors import QuantError
from quantcore.hub.access import own_token
from quantcore.hub.names import is_store_url
from quantcore.plan.hardware import Hardware

Reference = dict[str, Any]
"""A job's model as it is stored: a real path, or the name of a model elsewhere and the ``sha`` of its contents."""


async def take_turn(caller: Annotated[Caller, Depends(authenticate)], context: ContextDep) -> AsyncIterator[None]:
    """Wait for the project's turn to have models read, and hold it while the endpoint runs.

    The wait takes no thread: those who wait would soon have them all, and nobody else would be answered.
    """
    async with context.model_turns.take(caller.project_id):
        yield


TURN = Depends(take_turn, scope="function")
"""The dependency of every route that calls ``plan`` or ``inspect``."""


def plan(
    model: ModelRef, specs: Sequence[JobSpec], context: Context, caller: Caller, hardware: Hardware | None = None
) -> tuple[Reference, list[dict[str, Any]]]:
    """Return (the reference to store, an answer for each of ``specs``: see ``Readers.plan``). Raises QuantError.

    The reference says exactly what was read, so that a retry of the job quantizes the same bytes: a path as a real
    path, or a ``sha``: the commit that a revision on the Hub stood for at this moment, or the digest of the files in a
    store.
    """
    with _pointing_at("/model/path") if model.id is None else _pointing_at("/model/revision", "/model/id"):
        given, token = _given(model, context, caller)
        answer = context.readers.plan(given, specs, hardware, token=token)
    return _reference(model, given, answer["sha"]), answer["plans"]


def inspect(model: ModelRef, context: Context, caller: Caller) -> tuple[Reference, dict[str, Any]]:
    """Return (the reference as ``plan`` gives it, the inspection).

    Raises QuantError whose ``field`` names the parameter.
    """
    with _pointing_at("/path") if model.id is None else _pointing_at("/revision", "/id"):
        given, token = _given(model, context, caller)
        answer = context.readers.inspect(given, token=token)
    return _reference(model, given, answer["sha"]), answer["inspection"]


def _given(model: ModelRef, context: Context, caller: Caller) -> tuple[Reference, str | None]:
    """Return the model as a reader gets it, and the token for the Hub."""
    if model.path is not None:
        return {"path": str(_find(model.path, context, caller))}, None
    assert model.id is not None
    given = {"id": model.id, "revision": model.revision}
    if is_store_url(model.id):
        context.settings.check_model_url(model.id)
        return given, None
    if model.hub_token is None:
        return given, own_token()
    with context.sessions.begin() as session:
        sealed = hub_tokens.find_sealed(session, caller.project_id, model.hub_token)
    return given, hub_tokens.unseal(context.settings.vault, sealed, caller.project_id, model.hub_token)


def _reference(model: ModelRef, given: Reference, sha: str | None) -> Reference:
    if model.path is not None:
        return given
    named = {} if model.hub_token is None else {"hub_token": model.hub_token}
    return given | {"sha": sha} | named


def _find(path: str, context: Context, caller: Caller) -> Path:
    """Return the folder of a model as ``find_input`` does; it may be an artifact of the caller's project."""

    def is_own(folder: Path) -> bool:
        with context.sessions.begin() as session:
            return jobs.owns_artifact(session, caller.project_id, folder)

    return context.settings.find_input(path, field="", is_own=is_own)


@contextmanager
def _pointing_at(*fields: str) -> Iterator[None]:
    """Set the field of errors about a model: the first of ``fields`` if its revision is at fault, else the last."""
    try:
        yield
    except QuantError as error:
        error.field = error.field or fields[0 if error.code == "hub_revision_not_found" else -1]
        raise
