"""Publications of artifacts as rows: requested, found, moved. Workers take them in ``publication_leases``.

They are no part of the job's state: a push that fails takes nothing away from a job that succeeded. Code that changes a
publication also writes the job's event log, and locks the job's row first; code that takes rows without waiting need
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.orm import Session

from api.store.accounts import webhooks
from api.store.ids import new_id
from api.store.queue import events, outbox, publish_targets
from api.store.queue.events import NewEvent
from api.store.states import State
from api.store.tables.jobs import Job
from api.store.tables.publications import OPEN, Publication, PublicationState
from quantcore.config.verdict_levels import UNPUBLISHED


class CannotPublish(Exception):
    """The job cannot be published.

    ``code``: ``not_ready`` (no artifact yet), ``publication_in_progress``, ``nothing_to_retry``, ``poor_result``,
    ``target_taken`` (the folder is another project's).
    """

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def ask(session: Session, job: Job, asked: dict[str, Any] | None) -> Publication:
    """Add a publication of a locked job's artifact; with None retry the last one, which has failed.

    ``asked``: the target, and ``hub_token``. Raises CannotPublish.
    """
    if job.state != State.SUCCEEDED:
        raise CannotPublish("not_ready", f"The job is {job.state}: only a succeeded job has an artifact to publish.")
    last = find_last(session, [job.id]).get(job.id)
    if last is not None and last.state in OPEN:
        raise CannotPublish("publication_in_progress", f"The artifact is already being published: {last.id}.")
    if asked is not None:
        _check_result(job, asked)
        _take_target(session, job, asked)
        return _add(session, job, asked)
    if last is not None and (last.error or {}).get("code") == "poor_result":
        _check_result(job, {})
    if last is None or last.state != PublicationState.FAILED:
        raise CannotPublish("nothing_to_retry", "No publication of this job has failed: specify where to publish it.")
    _take_target(session, job, last.target)
    last.failure_count = last.lost_count = 0
    last.finished_at = last.error = last.progress = None
    last.run_at = func.clock_timestamp()
    move(session, job, last, PublicationState.PENDING)
    outbox.wake(session)
    return last


def ask_with_success(session: Session, job: Job) -> None:
    """Add the publication that the job was submitted with, in the transaction of its success.

    That of a result with a poor verdict or a missed goal has failed at once, unless it was to be published in any case.
    """
    if job.publish is None:
        return
    publication = _add(session, job, job.publish)
    try:
        _check_result(job, job.publish)
        _take_target(session, job, job.publish)
    except CannotPublish as error:
        reason = {"code": error.code, "message": error.message, "hint": error.hint, "retryable": False}
        give_up(session, job, publication, reason)


def _check_result(job: Job, asked: dict[str, Any]) -> None:
    """Raise CannotPublish ``poor_result`` for a result much worse than its original or its goal, unless forced."""
    summary = job.summary or {}
    verdict, goal = summary.get("verdict") or {}, summary.get("goal")
    if goal and not goal["is_met"]:
        reason, advice = f"missed its goal: {goal['why']}", "Allow a larger size, a lower recovery or more time."
    elif verdict.get("level") in UNPUBLISHED:
        reason = f"is {verdict['level']}: {verdict['reason']}"
        advice = verdict.get("advice") or "Use a scheme with more bits."
    else:
        return
    if not asked.get("force"):
        hint = f"{advice} Or publish it anyway with --force (force: true)."
        raise CannotPublish("poor_result", f"The result {reason}.", hint)


def _take_target(session: Session, job: Job, target: dict[str, Any]) -> None:
    """Make the folder the project's, from the first publication on. Raises CannotPublish ``target_taken``."""
    if "to" in target and not publish_targets.take(session, job.project_id, target["to"]):
        raise CannotPublish(
            "target_taken",
            f"Another project publishes to '{target['to']}', or to a folder in or around it.",
            "Publish to another folder. A folder belongs to the first project that published to it.",
        )


def find_last(session: Session, job_ids: Sequence[str]) -> dict[str, Publication]:
    """Return the newest publication by job id: ids sort by age."""
    publications = session.scalars(_newest(), {"job_ids": job_ids}) if job_ids else ()
    return {publication.job_id: publication for publication in publications}


@cache
def _newest() -> Select[Publication]:
    """Return the query for the newest publications. Made once: every response with jobs in it runs this."""
    theirs = Publication.job_id.in_(bindparam("job_ids", expanding=True))
    newest = select(func.max(Publication.id)).where(theirs).group_by(Publication.job_id)
    return select(Publication).where(Publication.id.in_(newest))


def is_open(session: Session, job_id: str) -> bool:
    """Return True if a publication of the job is still on its way."""
    wanted = select(Publication.id).where(Publication.job_id == job_id, Publication.state.in_(OPEN))
    return session.scalar(wanted) is not None


def _add(session: Session, job: Job, request: dict[str, Any]) -> Publication:
    target = {name: value for name, value in request.items() if name not in ("hub_token", "force")}
    publication = Publication(
        id=new_id("pub"),
        job_id=job.id,
        project_id=job.project_id,
        target=target,
        hub_token=request.get("hub_token"),
        attempt=0,
    )
    session.add(publication)
    session.flush()
    move(session, job, publication, PublicationState.PENDING)
    outbox.wake(session)
    return publication


def give_up(session: Session, job: Job, publication: Publication, error: dict[str, Any]) -> None:
    """End a publication that has failed for good."""
    publication.error, publication.finished_at = error, func.clock_timestamp()
    move(session, job, publication, PublicationState.FAILED, error=error)


def move(session: Session, job: Job, publication: Publication, state: PublicationState, **more: Any) -> None:
    """Move a publication to ``state``, with its event, and with the webhooks' messages for a state that is an end."""
    publication.state = state
    data = {"publication_id": publication.id, "state": state, "attempt": publication.attempt, **more}
    events.add(session, job, NewEvent("publication_changed", data))
    if state == PublicationState.PUBLISHED:
        webhooks.queue_about(session, job, webhooks.PUBLISHED, data)
    elif state == PublicationState.FAILED:
        webhooks.queue_about(session, job, webhooks.PUBLISH_FAILED, data)
    session.flush()
