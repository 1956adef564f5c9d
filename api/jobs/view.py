"""Shows a job as a response, with its ETag."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from api.http.conditional import tags_of
from api.http.errors import Problem
from api.jobs.schemas import JobOut, PublicationOut
from api.store.accounts import keys
from api.store.queue import jobs, publications, remaining, waiting
from api.store.queue.waiting import Waiting
from api.store.states import State
from api.store.tables.jobs import Job


@dataclass(frozen=True)
class Shown:
    """The response for a job, and its ETag."""

    out: JobOut
    etag: str


def show_all(session: Session, found: Sequence[Job]) -> list[Shown]:
    """Return the responses for the jobs ``found``, in the same order."""
    artifacts, reasons = jobs.find_artifacts(session, found), waiting.explain(session, found)
    published = publications.find_last(session, [job.id for job in found if job.state == State.SUCCEEDED])
    names = keys.find_names(session, {job.submitted_by for job in found if job.submitted_by})
    left_s = remaining.estimate_all(session, found)
    shown = []
    for job in found:
        reason = reasons.get(job.id)
        name = names.get(job.submitted_by or "")
        out = JobOut.of(job, artifacts.get(job.id), reason, published.get(job.id), name, left_s.get(job.id))
        shown.append(Shown(out, _etag(job, reason, out.publication, out.eta_s)))
    return shown


def show(session: Session, job: Job) -> Shown:
    return show_all(session, [job])[0]


def check_unchanged(if_match: str | None, job: Job) -> None:
    """Check that the job is as the client saw it. Raises Problem 428 without ``if_match``, 412 if it has changed."""
    if if_match is None:
        raise Problem(
            428,
            "if_match_required",
            "A change must say which state of the job it is based on.",
            hint="Send the ETag of your last GET as If-Match, or '*' to change whatever is there.",
        )
    versions = {tag.strip('"').partition("-")[0] for tag in tags_of(if_match)}
    if not versions & {str(job.version), "*"}:
        raise Problem(412, "job_changed", "The job has changed since you read it.", hint="GET it again, then decide.")


def _etag(job: Job, reason: Waiting | None, publication: PublicationOut | None, eta_s: float | None) -> str:
    """Return the row's version; while the job waits also the reason, the state of its publication, and its estimate.

    The latter three change without the row. If-Match looks at the version alone: a queue that moved is no reason to
    refuse a change.
    """
    more = [f"{reason.reason} {reason.position}"] if reason else []
    more += [publication.model_dump_json()] if publication else []
    more += [str(eta_s)] if eta_s is not None else []
    return f'"{job.version}-{zlib.crc32(" ".join(more).encode()):08x}"' if more else f'"{job.version}"'
