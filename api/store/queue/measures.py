"""Numbers about the whole service, for its monitoring: a handful of queries on indexes, one snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, SQLColumnExpression, case, func, literal_column, select, text
from sqlalchemy.orm import Session

from api.store.accounts import webhooks
from api.store.queue import integrity
from api.store.queue import workers as worker_rows
from api.store.states import CLAIMABLE, HELD, State
from api.store.tables.accounts import WebhookDelivery
from api.store.tables.jobs import Job, Outbox, Worker

# For the jobs that ended within the last hour: phase -> the number of jobs with it, and its seconds in all.
_PHASES = text(
    """
    SELECT done ->> 'name', count(*),
           sum(extract(epoch FROM (done ->> 'ended_at')::timestamptz - (done ->> 'started_at')::timestamptz))
    FROM job, jsonb_array_elements(phases) AS done
    WHERE finished_at > clock_timestamp() - interval '1 hour' AND done ->> 'state' = 'done'
    GROUP BY 1 ORDER BY 1
    """
)
_VERDICTS = text(
    """
    SELECT coalesce(summary -> 'verdict' ->> 'level', 'none'), count(*)
    FROM job
    WHERE finished_at > clock_timestamp() - interval '1 hour' AND state = 'succeeded'
    GROUP BY 1 ORDER BY 1
    """
)


@dataclass(frozen=True)
class Measures:
    """A snapshot of the numbers. Ages are seconds, 0 without anything of that age.

    ``phase_s``: name -> (number, seconds in all).
    """

    jobs: dict[str, int]
    oldest_wait_s: float
    lease_left_s: float | None  # of the lease that runs out first; below 0 nobody renews it
    outbox: int
    outbox_age_s: float
    deliveries: int
    delivery_age_s: float
    workers: dict[str, int]
    beat_age_s: float
    phase_s: dict[str, tuple[int, float]]
    verdicts: dict[str, int]  # of the jobs that succeeded within the last hour
    integrity: dict[str, int]  # findings by kind
    devices: dict[tuple[str, str, str], dict[str, int]]  # (worker, its number there, name) -> {total, used} bytes


def measure(session: Session) -> Measures:
    counts = {str(state): 0 for state in State}
    counts |= {row.state: row.number for row in session.execute(_counted(Job.state))}
    pending = WebhookDelivery.state == webhooks.PENDING
    draining = Worker.drain_requested_at.is_not(None)
    blocked = Worker.blocked_reason.is_not(None)
    names: list[ColumnElement[str]] = [
        literal_column(f"'{name}'") for name in ("draining", "blocked", "ready")
    ]  # literals, not parameters: the query groups by them
    state = case((draining, names[0]), (blocked, names[1]), else_=names[2])
    workers = {"ready": 0, "draining": 0, "blocked": 0}
    for row in session.execute(_counted(state).where(Worker.live_until > func.clock_timestamp())):
        workers[row.state] = row.number
    due = Job.state.in_(CLAIMABLE), Job.run_at <= func.clock_timestamp()
    left = func.min(func.extract("epoch", Job.lease_expires_at - func.clock_timestamp()))
    lease_left_s = session.scalar(select(left).where(Job.state.in_(HELD)))
    return Measures(
        jobs=counts,
        oldest_wait_s=_age_s(session, select(_oldest(Job.run_at)).where(*due)),
        lease_left_s=None if lease_left_s is None else float(lease_left_s),
        outbox=session.scalar(select(func.count()).select_from(Outbox)) or 0,
        outbox_age_s=_age_s(session, select(_oldest(Outbox.created_at))),
        deliveries=session.scalar(select(func.count()).select_from(WebhookDelivery).where(pending)) or 0,
        delivery_age_s=_age_s(session, select(_oldest(WebhookDelivery.created_at)).where(pending)),
        workers=workers,
        integrity=integrity.count(session),
        beat_age_s=_age_s(session, select(_oldest(Worker.beat_at))),
        devices=_devices(session),
        phase_s={name: (number, float(total)) for name, number, total in session.execute(_PHASES)},
        verdicts={row[0]: row[1] for row in session.execute(_VERDICTS)},
    )


def _devices(session: Session) -> dict[tuple[str, str, str], dict[str, int]]:
    devices = {}
    for worker in worker_rows.find_live(session):
        for number, device in enumerate(worker.devices):
            sizes = {"total": device.get("memory_bytes"), "used": device.get("used_bytes")}
            known_sizes = {what: size for what, size in sizes.items() if isinstance(size, int)}
            devices[worker.id, str(number), str(device.get("name", ""))] = known_sizes
    return devices


def _counted(column: SQLColumnExpression[Any]) -> Select[Any, int]:
    return select(column.label("state"), func.count().label("number")).group_by(column)


def _oldest(column: SQLColumnExpression[Any]) -> ColumnElement[Any]:
    return func.extract("epoch", func.clock_timestamp() - func.min(column))


def _age_s(session: Session, wanted: Select[Any]) -> float:
    return max(0.0, float(session.scalar(wanted) or 0))
