"""The routes of the registry's models, versions and aliases. Those of requests are in ``requests``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from sqlalchemy.orm import Session

from api.http.conditional import UNCHANGED, PagesDep
from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Admin, Reader, Writer
from api.http.strict_json import StrictJsonRoute
from api.jobs.endpoints import no_such_job
from api.registry.schemas import (
    ALIAS,
    MAX_VERSION,
    MODEL_NAME,
    Actors,
    AliasPut,
    ProtectedAliases,
    RegisteredModelOut,
    RegisteredModelPage,
    RegistryQuery,
    RegistryVersionOut,
    RegistryVersionPage,
    VersionCreate,
    VersionQuery,
)
from api.store.accounts import audit, keys, registry, webhooks
from api.store.accounts.audit import Caller
from api.store.engine import reading
from api.store.queue import jobs
from api.store.states import State
from api.store.tables.jobs import Project
from api.store.tables.registry import RegisteredModel

MAX_ALIASES = 50
"""Number of aliases that a model can have."""

router = APIRouter(prefix="/registry", tags=["registry"], route_class=StrictJsonRoute)

ModelName = Annotated[str, Path(pattern=MODEL_NAME)]
AliasName = Annotated[str, Path(pattern=ALIAS)]
Reference = Annotated[
    str, Path(pattern="^([1-9][0-9]{0,8}|[a-z][a-z0-9-]{0,62})$", description="A number or an alias.")
]
Number = Annotated[int, Path(ge=1, le=MAX_VERSION)]


@router.get("/protected-aliases")
def get_protected_aliases(caller: Reader, sessions: SessionsDep) -> ProtectedAliases:
    """Return the aliases that only an approved request moves."""
    with reading(sessions) as session:
        return ProtectedAliases(aliases=[*registry.protected_aliases(session, caller.project_id)])


@router.put("/protected-aliases", responses=may(422))
def put_protected_aliases(body: ProtectedAliases, caller: Admin, sessions: SessionsDep) -> ProtectedAliases:
    """Set the aliases that only an approved request moves, for all models of the project. None: `[]`."""
    aliases = sorted({*body.aliases})
    with sessions.begin() as session:
        session.get_one(Project, caller.project_id).protected_aliases = aliases
        audit.note(session, caller, "registry.protect", caller.project_id, aliases=aliases)
    return ProtectedAliases(aliases=aliases)


@router.get("/models", response_model=RegisteredModelPage, responses=UNCHANGED | may(422))
def list_registered_models(
    query: Annotated[RegistryQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> RegisteredModelPage | Response:
    """List the registry's models in the order of their names; the Link header leads to the next page."""
    with reading(sessions) as session:
        found = registry.page_of_models(session, caller.project_id, limit=query.limit + 1, after=query.cursor)
        protected = registry.protected_aliases(session, caller.project_id)
    shown = [RegisteredModelOut.of(listed, protected) for listed in found[: query.limit]]
    next_cursor = shown[-1].name if len(found) > query.limit else None
    page = RegisteredModelPage(data=shown, has_more=next_cursor is not None, next_cursor=next_cursor)
    return pages.answer(page, next_cursor)


@router.get("/models/{name}", responses=may(404))
def get_registered_model(name: ModelName, caller: Reader, sessions: SessionsDep) -> RegisteredModelOut:
    """Return a model with its aliases."""
    with reading(sessions) as session:
        return show_model(session, caller, open_model(session, caller, name))


@router.delete("/models/{name}", status_code=204, responses=may(404, 409))
def remove_registered_model(name: ModelName, caller: Writer, sessions: SessionsDep) -> None:
    """Remove a model with its versions, once it has no alias. The jobs and their files stay."""
    with sessions.begin() as session:
        model = lock_model(session, caller, name)
        names = [f"the alias {each.alias}" for each in registry.find_aliases(session, model)]
        check_unused(name, names + [f"the request {each.id}" for each in registry.find_pending(session, model)])
        session.delete(model)
        audit.note(session, caller, "registry.remove", name)


@router.post("/models/{name}/versions", status_code=201, responses=may(404, 409, 422))
def add_registry_version(
    name: ModelName, body: VersionCreate, caller: Writer, sessions: SessionsDep, response: Response
) -> RegistryVersionOut:
    """Add the result of a succeeded job as the next version; the first version makes the model.

    It is safe to repeat: a result that is a version already is returned as that version, with 200.
    """
    with sessions.begin() as session:
        job = jobs.lock_own(session, caller.project_id, body.job_id)
        if job is None:
            raise no_such_job()
        if job.state != State.SUCCEEDED:
            raise Problem(
                409, "not_ready", f"The job is {job.state}: only the result of a succeeded job can be a version."
            )
        model = registry.lock_or_add(session, caller.project_id, name)
        version, is_new = registry.add_version(session, model, job, caller.key_id)
        if is_new:
            number = version.version
            audit.note(session, caller, "registry.add", f"{name}@{number}", job_id=job.id)
            tell(session, caller, webhooks.VERSION_ADDED, model, version=number, job_id=job.id)
        response.status_code = 201 if is_new else 200
        response.headers["Location"] = f"/v1/registry/models/{name}/versions/{version.version}"
        return show_version(session, model, version.version)


@router.get("/models/{name}/versions", response_model=RegistryVersionPage, responses=UNCHANGED | may(404, 422))
def list_registry_versions(
    name: ModelName,
    query: Annotated[VersionQuery, Query()],
    caller: Reader,
    sessions: SessionsDep,
    pages: PagesDep,
) -> RegistryVersionPage | Response:
    """List the versions of a model, newest first; the Link header leads to the next page."""
    with reading(sessions) as session:
        model = open_model(session, caller, name)
        found = registry.page_of_versions(session, model, limit=query.limit + 1, before=query.cursor)
        actors = actors_of(session, {entry.version.key_id for entry in found})
    shown = [RegistryVersionOut.of(model, entry, actors) for entry in found[: query.limit]]
    next_cursor = shown[-1].version if len(found) > query.limit else None
    page = RegistryVersionPage(data=shown, has_more=next_cursor is not None, next_cursor=next_cursor)
    return pages.answer(page, str(next_cursor) if next_cursor else None)


@router.get("/models/{name}/versions/{version}", responses=may(404))
def get_registry_version(
    name: ModelName, version: Reference, caller: Reader, sessions: SessionsDep
) -> RegistryVersionOut:
    """Return a version of a model by its number, or the version that an alias points to."""
    with reading(sessions) as session:
        model = open_model(session, caller, name)
        if version.isdecimal():
            return show_version(session, model, int(version))
        alias = registry.find_alias(session, model, version)
        if alias is None:
            raise _no_such_alias(session, model, version)
        return show_version(session, model, alias.version)


@router.delete("/models/{name}/versions/{version}", status_code=204, responses=may(404, 409))
def remove_registry_version(name: ModelName, version: Number, caller: Writer, sessions: SessionsDep) -> None:
    """Remove a version that no alias points to. Its job and the files stay; its number is not used again."""
    with sessions.begin() as session:
        model = lock_model(session, caller, name)
        entry = registry.find_entry(session, model, version)
        if entry is None:
            raise no_such_version(name, version)
        asked = [each for each in registry.find_pending(session, model) if each.to_version == version]
        names = [f"the alias {alias}" for alias in entry.aliases] + [f"the request {each.id}" for each in asked]
        check_unused(f"{name}@{version}", names)
        registry.remove_version(session, model, version)
        audit.note(session, caller, "registry.remove", f"{name}@{version}", job_id=entry.job.id)


@router.put("/models/{name}/aliases/{alias}", responses=may(404, 409, 422))
def put_alias(
    name: ModelName, alias: AliasName, body: AliasPut, caller: Writer, sessions: SessionsDep
) -> RegisteredModelOut:
    """Point an alias to a version. A protected alias needs a request: `POST .../requests`."""
    with sessions.begin() as session:
        model = lock_model(session, caller, name)
        _check_not_protected(session, caller, model, alias)
        move_alias(session, caller, model, alias, body.version)
        return show_model(session, caller, model)


@router.delete("/models/{name}/aliases/{alias}", status_code=204, responses=may(404, 409))
def remove_alias(name: ModelName, alias: AliasName, caller: Writer, sessions: SessionsDep) -> None:
    """Remove an alias; its version stays. A protected alias needs a request: `POST .../requests`."""
    with sessions.begin() as session:
        model = lock_model(session, caller, name)
        _check_not_protected(session, caller, model, alias)
        if registry.find_alias(session, model, alias) is None:
            raise _no_such_alias(session, model, alias)
        move_alias(session, caller, model, alias, None)


def move_alias(
    session: Session, caller: Caller, model: RegisteredModel, alias: str, version: int | None, **why: str | None
) -> None:
    """Move an alias of a locked model, with its audit entry and webhook event; None removes it. Raises Problem."""
    if version is not None and registry.find_entry(session, model, version) is None:
        raise no_such_version(model.name, version)
    present = registry.find_alias(session, model, alias)
    if present is None and len(registry.find_aliases(session, model)) >= MAX_ALIASES:
        detail = f"The model already has {MAX_ALIASES} aliases, the maximum."
        raise Problem(409, "too_many_aliases", detail, hint="Remove one of them first.")
    from_version = present.version if present else None
    registry.move(session, model, alias, version)
    moved: dict[str, Any] = {"from_version": from_version, "version": version}
    audit.note(session, caller, "registry.move_alias", f"{model.name}@{alias}", **moved, **why)
    tell(session, caller, webhooks.ALIAS_MOVED, model, alias=alias, **moved, **why)


def tell(session: Session, caller: Caller, event_type: str, model: RegisteredModel, **data: object) -> None:
    """Queue a webhook event about a model, with the name of who did it."""
    actor = actors_of(session, {caller.key_id}).show(caller.key_id)
    by = actor and (actor.member.name if actor.member else actor.name)
    about = {"model": model.name, "project_id": model.project_id, "by": by}
    webhooks.queue(session, model.project_id, event_type, about | data)


def actors_of(session: Session, key_ids: Collection[str | None]) -> Actors:
    known = {key_id for key_id in key_ids if key_id}
    return Actors(keys.find_names(session, known), keys.find_members(session, known))


def show_model(session: Session, caller: Caller, model: RegisteredModel) -> RegisteredModelOut:
    [listed] = registry.describe(session, [model])
    return RegisteredModelOut.of(listed, registry.protected_aliases(session, caller.project_id))


def show_version(session: Session, model: RegisteredModel, version: int) -> RegistryVersionOut:
    """Return the response for a version. Raises Problem 404."""
    entry = registry.find_entry(session, model, version)
    if entry is None:
        raise no_such_version(model.name, version)
    return RegistryVersionOut.of(model, entry, actors_of(session, {entry.version.key_id}))


def open_model(session: Session, caller: Caller, name: str) -> RegisteredModel:
    """Return a model of the caller's project. Raises Problem 404."""
    return _there(registry.find(session, caller.project_id, name), name)


def lock_model(session: Session, caller: Caller, name: str) -> RegisteredModel:
    """Return a model as ``open_model`` does, with its row locked."""
    return _there(registry.lock(session, caller.project_id, name), name)


def check_unused(name: str, users: Collection[str]) -> None:
    """Check that nothing refers to what is to be removed. Raises Problem 409."""
    if users:
        raise Problem(
            409,
            "in_use",
            f"{name} is in use: {', '.join(users)}.",
            hint="Move or remove the aliases first, and decide or withdraw the requests.",
        )


def no_such_version(name: str, version: int) -> Problem:
    hint = f"`bitfoundry registry show {name}` shows its versions."
    return Problem(404, "version_not_found", f"The model '{name}' has no version {version}.", hint=hint)


def _there(model: RegisteredModel | None, name: str) -> RegisteredModel:
    if model is None:
        hint = "`bitfoundry registry list` shows the models."
        raise Problem(404, "model_not_registered", f"The registry has no model '{name}'.", hint=hint)
    return model


def _no_such_alias(session: Session, model: RegisteredModel, alias: str) -> Problem:
    names = [each.alias for each in registry.find_aliases(session, model)]
    hint = f"It has {', '.join(names)}." if names else "It has no alias yet."
    return Problem(404, "alias_not_found", f"The model '{model.name}' has no alias '{alias}'.", hint=hint)


def _check_not_protected(session: Session, caller: Caller, model: RegisteredModel, alias: str) -> None:
    if alias in registry.protected_aliases(session, caller.project_id):
        raise Problem(
            409,
            "alias_protected",
            f"The alias '{alias}' is protected: only an approved request moves it.",
            hint=f"Ask for it with a reason: POST /v1/registry/models/{model.name}/requests.",
        )
