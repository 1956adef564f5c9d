"""The model registry as rows: models, versions, aliases, requests. What changes a model locks its row first (``lock``).

Whoever locks a job as well locks it before the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.store.ids import new_id
from api.store.tables.jobs import Artifact, Job, Project
from api.store.tables.registry import AliasRequest, RegisteredModel, RegistryAlias, RegistryVersion

PENDING, APPROVED, REFUSED, WITHDRAWN = "pending", "approved", "refused", "withdrawn"


@dataclass(frozen=True)
class Entry:
    """A version with the job that made it, the job's artifact, and the aliases that point to it."""

    version: RegistryVersion
    job: Job
    artifact: Artifact
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Listed:
    """A model with its aliases in the order of their names, its newest version, and the number of both kinds.

    ``latest_verdict``: the level of the newest version's verdict, if it has one.
    """

    model: RegisteredModel
    aliases: tuple[RegistryAlias, ...]
    latest_version: int | None
    latest_verdict: str | None
    num_versions: int
    num_pending: int


def protected_aliases(session: Session, project_id: str) -> Sequence[str]:
    """Return the aliases that only an approved request moves."""
    return session.execute(select(Project.protected_aliases).where(Project.id == project_id)).scalar_one()


def find(session: Session, project_id: str, name: str) -> RegisteredModel | None:
    return session.scalar(
        select(RegisteredModel).where(RegisteredModel.project_id == project_id, RegisteredModel.name == name)
    )


def lock(session: Session, project_id: str, name: str) -> RegisteredModel | None:
    """Return the model, with its row locked until the end of the transaction."""
    wanted = select(RegisteredModel).where(RegisteredModel.project_id == project_id, RegisteredModel.name == name)
    return session.scalar(wanted.with_for_update().execution_options(populate_existing=True))


def lock_or_add(session: Session, project_id: str, name: str) -> RegisteredModel:
    """Return the model as ``lock`` does. It is added if it is not there."""
    new = insert(RegisteredModel).values(id=new_id("mdl"), project_id=project_id, name=name)
    session.execute(new.on_conflict_do_nothing(index_elements=["project_id", "name"]))
    model = lock(session, project_id, name)
    assert model is not None
    return model


def page_of_models(session: Session, project_id: str, *, limit: int, after: str | None) -> Sequence[Listed]:
    """Return models in the order of their names, from behind the name ``after``."""
    wanted = select(RegisteredModel).where(RegisteredModel.project_id == project_id)
    if after is not None:
        wanted = wanted.where(RegisteredModel.name > after)
    return describe(session, session.scalars(wanted.order_by(RegisteredModel.name).limit(limit)).all())


def describe(session: Session, models: Sequence[RegisteredModel]) -> Sequence[Listed]:
    ids = [model.id for model in models]
    aliases: dict[str, list[RegistryAlias]] = {}
    wanted = select(RegistryAlias).where(RegistryAlias.model_id.in_(ids)).order_by(RegistryAlias.alias)
    for alias in session.scalars(wanted):
        aliases.setdefault(alias.model_id, []).append(alias)
    numbers = select(RegistryVersion.model_id, func.max(RegistryVersion.version), func.count())
    numbers = numbers.where(RegistryVersion.model_id.in_(ids)).group_by(RegistryVersion.model_id)
    versions = {model_id: (latest, count) for model_id, latest, count in session.execute(numbers)}
    verdicts = verdicts_of(session, {(model_id, latest) for model_id, (latest, _) in versions.items()})
    open_ones = select(AliasRequest.model_id, func.count()).where(AliasRequest.model_id.in_(ids))
    open_ones = open_ones.where(AliasRequest.state == PENDING).group_by(AliasRequest.model_id)
    pending = dict(session.execute(open_ones).all())
    listed = []
    for model in models:
        latest_version, num_versions = versions.get(model.id, (None, 0))
        of_model = tuple(aliases.get(model.id, ()))
        verdict = verdicts.get((model.id, latest_version))
        listed.append(Listed(model, of_model, latest_version, verdict, num_versions, pending.get(model.id, 0)))
    return listed


def verdicts_of(
    session: Session, versions: Collection[tuple[str, int | None]]
) -> Mapping[tuple[str, int | None], str | None]:
    """Return (id of the model, version) -> the level of the version's verdict; nothing for one that is not there."""
    level = Job.summary["verdict"]["level"].astext
    wanted = select(RegistryVersion.model_id, RegistryVersion.version, level).join(
        Job, Job.id == RegistryVersion.job_id
    )
    found = wanted.where(tuple_(RegistryVersion.model_id, RegistryVersion.version).in_([*versions]))
    return {(model_id, version): verdict for model_id, version, verdict in session.execute(found)}


def add_version(session: Session, model: RegisteredModel, job: Job, key_id: str | None) -> tuple[RegistryVersion, bool]:
    """Return (the version of a locked model that is the result of a locked job, whether it is new)."""
    of_job = select(RegistryVersion).where(RegistryVersion.model_id == model.id, RegistryVersion.job_id == job.id)
    before = session.scalar(of_job)
    if before is not None:
        return before, False
    model.last_version += 1
    version = RegistryVersion(model_id=model.id, version=model.last_version, job_id=job.id, key_id=key_id)
    session.add(version)
    session.flush()
    session.refresh(version)
    return version, True


def find_entry(session: Session, model: RegisteredModel, version: int) -> Entry | None:
    found = _entries(session, model, RegistryVersion.version == version, limit=1)
    return found[0] if found else None


def page_of_versions(session: Session, model: RegisteredModel, *, limit: int, before: int | None) -> Sequence[Entry]:
    """Return versions with a number below ``before``, the newest first."""
    return _entries(session, model, *([RegistryVersion.version < before] if before is not None else ()), limit=limit)


def find_alias(session: Session, model: RegisteredModel, alias: str) -> RegistryAlias | None:
    wanted = select(RegistryAlias).where(RegistryAlias.model_id == model.id, RegistryAlias.alias == alias)
    return session.scalar(wanted.execution_options(populate_existing=True))


def find_aliases(session: Session, model: RegisteredModel) -> Sequence[RegistryAlias]:
    """Return the aliases of the model in the order of their names."""
    wanted = select(RegistryAlias).where(RegistryAlias.model_id == model.id)
    return session.scalars(wanted.order_by(RegistryAlias.alias)).all()


def move(session: Session, model: RegisteredModel, alias: str, version: int | None) -> None:
    """Point an alias of a locked model to a version that it has; None removes the alias."""
    if version is None:
        of_name = RegistryAlias.model_id == model.id, RegistryAlias.alias == alias
        session.execute(delete(RegistryAlias).where(*of_name))
        return
    new = insert(RegistryAlias).values(model_id=model.id, alias=alias, version=version)
    moved = {"version": version, "moved_at": func.clock_timestamp()}
    session.execute(new.on_conflict_do_update(index_elements=["model_id", "alias"], set_=moved))


def remove_version(session: Session, model: RegisteredModel, version: int) -> None:
    """Remove a version that no alias and no pending request names. Its job stays, and may be deleted from now on."""
    of_number = RegistryVersion.model_id == model.id, RegistryVersion.version == version
    session.execute(delete(RegistryVersion).where(*of_number))


def names_of(session: Session, job_id: str) -> Sequence[str]:
    """Return the versions that are the result of this job, as ``support-bot@3``."""
    wanted = select(RegisteredModel.name, RegistryVersion.version).join(
        RegistryVersion, RegistryVersion.model_id == RegisteredModel.id
    )
    rows = session.execute(wanted.where(RegistryVersion.job_id == job_id).order_by(RegisteredModel.name))
    return [f"{name}@{version}" for name, version in rows]


def ask(
    session: Session, model: RegisteredModel, alias: str, to_version: int | None, reason: str, key_id: str | None
) -> AliasRequest:
    """Store a request to move an alias of a locked model. It states where the alias points now."""
    present = find_alias(session, model, alias)
    request = AliasRequest(
        id=new_id("rqs"),
        model_id=model.id,
        alias=alias,
        from_version=present.version if present else None,
        to_version=to_version,
        reason=reason,
        asked_by=key_id,
    )
    session.add(request)
    session.flush()
    session.refresh(request)
    return request


def find_pending(session: Session, model: RegisteredModel) -> Sequence[AliasRequest]:
    wanted = select(AliasRequest).where(AliasRequest.model_id == model.id, AliasRequest.state == PENDING)
    return session.scalars(wanted.order_by(AliasRequest.id)).all()


def find_request(session: Session, project_id: str, request_id: str) -> tuple[AliasRequest, RegisteredModel] | None:
    wanted = select(AliasRequest, RegisteredModel).join(RegisteredModel, RegisteredModel.id == AliasRequest.model_id)
    row = session.execute(wanted.where(AliasRequest.id == request_id, RegisteredModel.project_id == project_id))
    return (found := row.one_or_none()) and (found[0], found[1])


def lock_request(session: Session, project_id: str, request_id: str) -> tuple[AliasRequest, RegisteredModel] | None:
    """Return the request and its model, with the model's row locked: of two decisions the second sees the first."""
    found = find_request(session, project_id, request_id)
    if found is None:
        return None
    request, model = found
    still_there = select(RegisteredModel.id).where(RegisteredModel.id == model.id).with_for_update()
    if session.scalar(still_there) is None:  # it was removed meanwhile, and its requests with it
        return None
    session.refresh(request)
    return request, model


def page_of_requests(
    session: Session, project_id: str, *, state: str | None, name: str | None, limit: int, before: str | None
) -> Sequence[tuple[AliasRequest, RegisteredModel]]:
    """Return requests with an id below ``before``, the newest first: ids sort by age."""
    wanted = select(AliasRequest, RegisteredModel).join(RegisteredModel, RegisteredModel.id == AliasRequest.model_id)
    wanted = wanted.where(RegisteredModel.project_id == project_id).order_by(AliasRequest.id.desc()).limit(limit)
    if state is not None:
        wanted = wanted.where(AliasRequest.state == state)
    if name is not None:
        wanted = wanted.where(RegisteredModel.name == name)
    if before is not None:
        wanted = wanted.where(AliasRequest.id < before)
    return session.execute(wanted).all()


def decide(session: Session, request: AliasRequest, state: str, key_id: str | None, comment: str | None) -> None:
    """Close a pending request of a locked model."""
    request.state, request.decided_by, request.comment = state, key_id, comment
    request.decided_at = func.clock_timestamp()
    session.flush()
    session.refresh(request)


def _entries(session: Session, model: RegisteredModel, *which: object, limit: int) -> Sequence[Entry]:
    wanted = (
        select(RegistryVersion, Job, Artifact)
        .join(Job, Job.id == RegistryVersion.job_id)
        .join(Artifact, Artifact.id == Job.artifact_id)
        .where(RegistryVersion.model_id == model.id, *which)  # type: ignore[arg-type]
        .order_by(RegistryVersion.version.desc())
        .limit(limit)
    )
    rows = session.execute(wanted).all()
    named = _aliases_of(session, model, [version.version for version, _, _ in rows])
    return [Entry(version, job, artifact, named.get(version.version, ())) for version, job, artifact in rows]


def _aliases_of(session: Session, model: RegisteredModel, versions: Collection[int]) -> dict[int, tuple[str, ...]]:
    wanted = select(RegistryAlias.version, RegistryAlias.alias).where(RegistryAlias.model_id == model.id)
    named: dict[int, tuple[str, ...]] = {}
    for version, alias in session.execute(
        wanted.where(RegistryAlias.version.in_(versions)).order_by(RegistryAlias.alias)
    ):
        named[version] = (*named.get(version, ()), alias)
    return named
