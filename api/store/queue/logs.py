"""The output of engines, line by line: kept here, because a worker's disk goes with its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from api.store.tables.jobs import LOG_LEVELS, Job, LogLine

MAX_LINES = 20_000  # of a job; the newest are kept


@dataclass(frozen=True)
class NewLine:
    """A line that has no number yet; ``level`` is one of ``LOG_LEVELS``."""

    level: str
    text: str


def append(session: Session, job: Job, lines: Sequence[NewLine]) -> None:
    """Number ``lines`` and insert them. The caller holds the row lock of ``job``, so numbers have no gaps."""
    for line in lines:
        job.num_log_lines += 1
        session.add(
            LogLine(job_id=job.id, seq=job.num_log_lines, attempt=job.attempt, level=line.level, text=line.text)
        )
    if job.num_log_lines > MAX_LINES:
        session.flush()
        too_old = LogLine.seq <= job.num_log_lines - MAX_LINES
        session.execute(delete(LogLine).where(LogLine.job_id == job.id, too_old))


def read(session: Session, job_id: str, *, level: str, after: int, limit: int) -> Sequence[LogLine]:
    """Return at most ``limit`` lines of at least ``level`` with ``seq`` above ``after``, in order."""
    wanted = select(LogLine).where(LogLine.job_id == job_id, LogLine.seq > after, LogLine.level.in_(_at_least(level)))
    return session.scalars(wanted.order_by(LogLine.seq).limit(limit)).all()


def read_tail(session: Session, job_id: str, *, level: str, num_lines: int) -> Sequence[LogLine]:
    """Return the last ``num_lines`` lines of at least ``level``, in order."""
    wanted = select(LogLine).where(LogLine.job_id == job_id, LogLine.level.in_(_at_least(level)))
    return session.scalars(wanted.order_by(LogLine.seq.desc()).limit(num_lines)).all()[::-1]


def _at_least(level: str) -> tuple[str, ...]:
    return LOG_LEVELS[LOG_LEVELS.index(level) :]
