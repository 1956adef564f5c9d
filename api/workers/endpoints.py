"""The routes of workers, for operators: workers are shared by all projects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict
from sqlalchemy.orm import Session

from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import Operator
from api.store.accounts import audit
from api.store.queue import workers
from api.store.tables.jobs import Job, Worker

router = APIRouter(prefix="/workers", tags=["workers"])

WorkerId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._:-]{1,300}$")]


class HeldJobOut(BaseModel):
    """A job that a worker holds now."""

    id: str
    project_id: str
    state: str
    phase: str | None

    @classmethod
    def of(cls, job: Job) -> HeldJobOut:
        return cls(id=job.id, project_id=job.project_id, state=job.state, phase=job.phase)


class WorkerOut(BaseModel):
    """A worker, its hardware and its jobs.

    ``state`` draining: it takes no jobs, and gives back those that it has; blocked: it takes no jobs as long as
    `blocked_reason` holds; silent: no heartbeat came in time, so it counts no more until it comes back. `sandbox` is
    the protection of its engines: `landlock` and its version, `none` or `off`. `memory_limit` is what limits their
    memory: `cgroup` (the kernel) or `watched` (the worker). Both are `unknown` for workers of an older version.
    `launcher` is what gives engines their nodes: `local`, or the name of a scheduler, as `slurm`.
    """

    model_config = ConfigDict(
        json_schema_serialization_defaults_required=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "gpu-7:4711:0a1b2c3d",
                    "host": "gpu-7",
                    "state": "ready",
                    "num_slots": 1,
                    "memory_bytes": 549755813888,
                    "devices": [{"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}],
                    "launcher": "local",
                    "sandbox": "landlock 6",
                    "memory_limit": "cgroup",
                    "started_at": "2026-11-22T08:00:00Z",
                    "beat_at": "2026-11-22T09:30:00Z",
                    "drain_requested_at": None,
                    "blocked_reason": None,
                    "jobs": [],
                }
            ]
        },
    )

    id: str
    host: str
    state: Literal["ready", "draining", "blocked", "silent"]
    num_slots: int
    memory_bytes: int
    devices: list[dict[str, Any]]
    launcher: str = "local"
    sandbox: str = "unknown"
    memory_limit: Literal["cgroup", "watched", "unknown"] = "unknown"
    started_at: datetime
    beat_at: datetime
    drain_requested_at: datetime | None
    blocked_reason: str | None
    jobs: list[HeldJobOut]


class WorkerList(BaseModel):
    """The live workers, by host."""

    data: list[WorkerOut]


@router.get("")
def list_workers(caller: Operator, sessions: SessionsDep) -> WorkerList:
    """List the live workers: devices, last heartbeat, jobs in hand."""
    with sessions.begin() as session:
        return WorkerList(data=[_show(session, worker) for worker in workers.find_live(session)])


@router.get("/{worker_id}", responses=may(404))
def get_worker(worker_id: WorkerId, caller: Operator, sessions: SessionsDep) -> WorkerOut:
    """Return a worker."""
    with sessions.begin() as session:
        return _show(session, _open(session, worker_id))


@router.post("/{worker_id}/drain", status_code=202, responses=may(404))
def drain_worker(worker_id: WorkerId, caller: Operator, sessions: SessionsDep) -> WorkerOut:
    """Drain the worker: it takes no more jobs, and with its next heartbeat it gives back those in hand.

    They go back to the queue, charged nothing.
    """
    with sessions.begin() as session:
        worker = _open(session, worker_id)
        workers.drain(session, worker)
        audit.note(session, caller, "worker.drain", worker_id)
        return _show(session, worker)


@router.post("/{worker_id}/uncordon", status_code=202, responses=may(404))
def uncordon_worker(worker_id: WorkerId, caller: Operator, sessions: SessionsDep) -> WorkerOut:
    """Let the worker take jobs again."""
    with sessions.begin() as session:
        worker = _open(session, worker_id)
        workers.uncordon(session, worker)
        audit.note(session, caller, "worker.uncordon", worker_id)
        return _show(session, worker)


def _open(session: Session, worker_id: str) -> Worker:
    worker = workers.find(session, worker_id)
    if worker is None:
        raise Problem(404, "worker_not_found", "There is no such worker.", hint="GET /v1/workers lists them.")
    return worker


def _show(session: Session, worker: Worker) -> WorkerOut:
    columns = {name: getattr(worker, name) for name in WorkerOut.model_fields.keys() - {"state", "jobs"}}
    jobs = [HeldJobOut.of(job) for job in workers.find_jobs(session, worker.id)]
    return WorkerOut(**columns, state=_state(session, worker), jobs=jobs)


def _state(session: Session, worker: Worker) -> Literal["ready", "draining", "blocked", "silent"]:
    if workers.is_silent(session, worker):
        return "silent"
    if worker.drain_requested_at:
        return "draining"
    return "blocked" if worker.blocked_reason else "ready"
