"""Turns a request into a queued job: planned first, then stored once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy.orm import Session

from api import tracing
from api.http.deps import Context
from api.http.idempotent import MadeOnce, make_once, request_of
from api.jobs import calibration, service
from api.jobs.schemas import JobClone, JobCreate, asked_of
from api.jobs.service import Planned
from api.store.accounts import audit, datasets
from api.store.accounts.audit import Caller
from api.store.queue import jobs
from api.store.tables.jobs import Job
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import is_dataset_id
from quantcore.plan.job import default_exports


def submit(body: JobCreate, caller: Caller, context: Context, idempotency_key: str | None) -> MadeOnce:
    """Plan the job and queue it. Raises QuantError or Problem for a request that cannot work."""
    made = make_once(
        context.sessions,
        request_of(caller, "POST /v1/jobs", idempotency_key, body),
        "job",
        lambda: service.make_job(body, context, caller),
        lambda session, job_id, planned: store(session, job_id, body, planned, caller),
    )
    context.upkeep.relay_now()  # after the commit: the message must not overtake the row
    return made


def clone(original: Job, body: JobClone, caller: Caller, context: Context, idempotency_key: str | None) -> MadeOnce:
    """Queue a job like ``original`` except for the fields in ``body``. A Hub model stays at the commit it had."""
    changes = body.root
    wanted = _merge(original, changes)

    def prepare() -> Planned:
        planned = service.make_job(wanted, context, caller)
        return planned if "config" in changes else replace(planned, preset=original.preset)

    made = make_once(
        context.sessions,
        request_of(caller, f"POST /v1/jobs/{original.id}/clone", idempotency_key, body),
        "job",
        prepare,
        lambda session, job_id, planned: store(session, job_id, wanted, planned, caller, cloned_from=original.id),
    )
    context.upkeep.relay_now()
    return made


def store(session: Session, job_id: str, body: JobCreate, planned: Planned, caller: Caller, **more: Any) -> Job:
    """Store the job's row and what goes with it; ``more``: further columns.

    Raises QuotaExceeded, and CalibrationError for a dataset that was deleted a moment ago.
    """
    spec = planned.spec
    for number, part in enumerate(spec.calibration.sources):
        _keep_dataset(session, part.source, caller, f"/calibration/sources/{number}/source")
    dataset_id = _keep_dataset(session, spec.calibration.source, caller, "/calibration/source")
    evaluation_dataset_id = _keep_dataset(session, spec.evaluation.source, caller, "/evaluation/source")
    audit.note(session, caller, "job.submit", job_id)
    return jobs.submit(
        session,
        id=job_id,
        project_id=caller.project_id,
        submitted_by=caller.key_id,
        name=body.name,
        labels=body.labels,
        priority=body.priority,
        max_runtime_s=body.limits.max_runtime_s,
        max_pending_s=body.limits.max_pending_s,
        needs_memory_bytes=planned.plan["peak_memory_bytes"],
        model=planned.model,
        preset=planned.preset,
        spec=spec.to_dict(),
        dataset_id=dataset_id,
        evaluation_dataset_id=evaluation_dataset_id,
        traceparent=tracing.current(),
        publish=planned.publish,
        **more,
    )


def _keep_dataset(session: Session, source: str | None, caller: Caller, field: str) -> str | None:
    """Return the id of the dataset that a text is, if it is one, and hold it until the job is stored."""
    if source is None or not is_dataset_id(source):
        return None
    if not datasets.keep_for_job(session, caller.project_id, source):
        raise calibration.no_such_dataset(field)
    return source


def _has_default_exports(job: Job) -> bool:
    """Return whether a job writes the format that its scheme has by default."""
    spec = JobSpec.model_validate(job.spec)
    return spec.export == default_exports(spec)


CHOSEN_BY_GOALS = ("config", "mix", "effort", "export", "file2file")
"""Fields of a request that a goal decides, so that they cannot stand beside it."""


def _merge(original: Job, changes: dict[str, Any]) -> JobCreate:
    model = original.model
    fields: dict[str, Any] = asked_of(original) | {
        "model": {"id": model["id"], "revision": model["sha"], "hub_token": model.get("hub_token")}
        if "id" in model
        else model,
        "name": original.name,
        "labels": original.labels,
        "priority": original.priority,
        "limits": {"max_runtime_s": original.max_runtime_s, "max_pending_s": original.max_pending_s},
    }
    if changes.get("goal"):  # in place of what the original was told
        fields = {name: value for name, value in fields.items() if name not in CHOSEN_BY_GOALS}
    elif fields.get("goal"):  # it chose both, and will choose again
        fields = {name: value for name, value in fields.items() if name not in ("config", "export")}
    elif not changes.keys().isdisjoint(("config", "mix")) and _has_default_exports(original):
        del fields["export"]  # another scheme has another default
    elif changes.get("effort") and "config" not in changes:  # it replaces the algorithms of the original
        fields["config"] = fields["config"] | {"algo_config": []}
    try:
        return JobCreate.model_validate(fields | changes)
    except ValidationError as error:
        places = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(places) from error
