"""Runs the worker's slots: threads that look for jobs, run them one at a time, and give them back on a drain.

A slot looks when it is woken (a Celery message) and every ``poll_s`` seconds anyway: a lost message costs one interval.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, load_only

from api import confinement, disk
from api.settings import Settings
from api.store.engine import Sessions, connect, dispose, reason_of
from api.store.queue import chat_leases, leases, node_slots, publication_leases, workers
from api.store.queue.maintenance import Maintenance
from api.store.queue.outbox import Send
from api.store.states import CLAIMABLE, FINAL, HELD
from api.store.tables.jobs import Job
from quantcore.plan.this_machine import find_devices
from worker import allocation, cgroup, workspace
from worker.chatting import Conversation
from worker.engine import Stop
from worker.launchers import Launcher, LauncherAway, find_launcher
from worker.node_run import NodeRun
from worker.publisher import Publish
from worker.runner import Run

logger = logging.getLogger(__name__)


class Supervisor:
    """The owner of all slots. Call ``start``, then ``look_now`` at every wake-up; ``drain`` and ``join`` to end."""

    def __init__(self, settings: Settings, send: Send) -> None:
        self._settings = settings
        self._sessions = connect(settings.database_url.get_secret_value(), pool_size=3 * (settings.slots + 1) + 3)
        self._upkeep = Maintenance(
            self._sessions, send, interval_s=settings.poll_s, lease_s=settings.lease_s, extra_task=self._do_round
        )
        self._id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._draining = False
        self._blocked_reason: str | None = None
        self._launcher = find_launcher(settings)
        self._undertaker: threading.Thread | None = None
        take = take_job if self._launcher is None else partial(take_job_for, self._launcher)
        self._slots = [
            *(Slot(self._sessions, settings, f"{self._id}:{number}", take) for number in range(settings.slots)),
            Slot(self._sessions, settings, f"{self._id}:publisher", take_publication),
        ]

    def start(self) -> None:
        confinement.tell(self._settings)
        logger.info("the memory of engines is limited: %s", cgroup.describe())
        self._upkeep.start()
        for slot in self._slots:
            slot.start()

    def look_now(self) -> None:
        """Wake all slots: there may be work to claim."""
        for slot in self._slots:
            slot.look_now()

    def drain(self) -> None:
        """Claim no more, end the engines, give their jobs back. Returns at once; ``join`` waits for the end."""
        self._draining = True
        self._upkeep.round_now()
        for slot in self._slots:
            slot.drain()

    def join(self) -> None:
        for slot in self._slots:
            slot.join()
        self._upkeep.stop()
        with suppress(SQLAlchemyError), self._sessions.begin() as session:
            workers.leave(session, self._id)  # the last round of upkeep may have begun before the drain
        dispose(self._sessions)

    def _do_round(self, session: Session) -> int:
        """Do this worker's part of an upkeep round."""
        self._say_where_we_are(session)
        remove_stale_attempts(session, self._settings, has_room=self._blocked_reason is None)
        if self._launcher is not None:
            self._end_orphans(session, self._launcher)
        return 0

    def _end_orphans(self, session: Session, launcher: Launcher) -> None:
        """Cancel the allocations of jobs that ended while no worker held them. It may take long: in a thread."""
        is_busy = self._undertaker is not None and self._undertaker.is_alive()
        if not is_busy and (orphans := find_orphans(session, self._settings)):
            self._undertaker = threading.Thread(target=end_orphans, args=(launcher, orphans), daemon=True)
            self._undertaker.start()

    def _say_where_we_are(self, session: Session) -> None:
        """Report this worker's state: clients see what their jobs wait for, and that may be a worker."""
        if self._draining:
            workers.leave(session, self._id)
        else:
            blocked_reason = disk.look(self._settings).explain()
            if blocked_reason != self._blocked_reason:
                logger.warning(
                    "accepting jobs again" if blocked_reason is None else f"not accepting jobs: {blocked_reason}"
                )
                self._blocked_reason = blocked_reason
            settings = self._settings
            worker = workers.Registration(
                id=self._id,
                host=socket.gethostname(),
                num_slots=settings.slots,
                memory_bytes=settings.memory_bytes,
                launcher=settings.launcher,
                sandbox=confinement.describe(settings),
                memory_limit=cgroup.describe(),
            )
            cordoned = workers.beat(
                session,
                worker,
                devices=find_devices(),  # each time: their used memory changes
                live_s=max(settings.lease_s, 3 * settings.poll_s),
                blocked_reason=blocked_reason,
            )
            for slot in self._slots:
                slot.cordon(cordoned)


class Work(Protocol):
    """The work of a slot: a ``Run``, a ``NodeRun`` of a job that another worker leads, a chat, or a ``Publish``."""

    def execute(self) -> None: ...

    def stop(self, reason: Stop) -> None: ...


Take = Callable[[Sessions, Settings, str], Work | None]


def take_job(sessions: Sessions, settings: Settings, worker: str) -> Work | None:
    """Take a seat of a job that waits for this worker, else claim a job, else a chat: jobs go first.

    Returns None if there is none, or no disk space.
    """
    if disk.look(settings).fault():
        return None
    claimed_at = time.monotonic()
    with sessions.begin() as session:
        if workers.is_drained(session, worker):
            return None
        claimant: dict[str, Any] = {
            "worker": worker,
            "lease_s": settings.lease_s,
            "memory_bytes": settings.memory_bytes,
        }
        seat = node_slots.take(session, **claimant)
        lease = None if seat else leases.claim(session, **claimant)
        chat = None if seat or lease else chat_leases.claim(session, **claimant)
    if seat is not None:
        logger.info("%s: node %d, fence %d", seat.job_id, seat.node_rank, seat.fence)
        return NodeRun(seat, sessions, settings, claimed_at=claimed_at)
    if chat is not None:
        logger.info("%s: of %s, fence %d", chat.chat_id, chat.job_id, chat.fence)
        return Conversation(chat, sessions, settings, claimed_at=claimed_at)
    if lease is None:
        return None
    logger.info("%s: attempt %d, fence %d", lease.job_id, lease.attempt, lease.fence)
    return Run(lease, sessions, settings, claimed_at=claimed_at, launcher=None)


def take_job_for(launcher: Launcher, sessions: Sessions, settings: Settings, worker: str) -> Work | None:
    """Claim a job whose engine the launcher starts elsewhere, on as many nodes as it needs; None if there is none.

    No chat: its engine would wait in the scheduler's queue while a person waits for an answer.
    """
    if disk.look(settings).fault():
        return None
    claimed_at = time.monotonic()
    with sessions.begin() as session:
        if workers.is_drained(session, worker):
            return None
        lease = leases.claim(
            session, worker=worker, lease_s=settings.lease_s, memory_bytes=settings.memory_bytes, brings_nodes=True
        )
    if lease is None:
        return None
    logger.info("%s: attempt %d, fence %d, by %s", lease.job_id, lease.attempt, lease.fence, launcher.name)
    return Run(lease, sessions, settings, claimed_at=claimed_at, launcher=launcher)


def take_publication(sessions: Sessions, settings: Settings, worker: str) -> Work | None:
    """Claim one publication, or return None. It needs no device, so it does not wait for a job to end."""
    claimed_at = time.monotonic()
    with sessions.begin() as session:
        if workers.is_drained(session, worker):
            return None
        lease = publication_leases.claim(session, worker=worker, lease_s=settings.lease_s)
    if lease is None:
        return None
    logger.info("%s: attempt %d, fence %d", lease.publication_id, lease.attempt, lease.fence)
    return Publish(lease, sessions, settings, claimed_at=claimed_at)


class Slot(threading.Thread):
    """A thread that does one piece of work at a time.

    It lives as long as the worker: the kernel ties its children to it.
    """

    def __init__(self, sessions: Sessions, settings: Settings, name: str, take: Take) -> None:
        super().__init__(name=f"slot-{name}", daemon=True)
        self._worker = name
        self._take = take
        self._sessions = sessions
        self._settings = settings
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._draining = False
        self._cordoned = False
        self._current: Work | None = None

    def look_now(self) -> None:
        self._woken.set()

    def cordon(self, cordoned: bool) -> None:
        """Take no jobs while ``cordoned``, and give the running one back. Called with every heartbeat."""
        with self._lock:
            if cordoned == self._cordoned:
                return
            self._cordoned = cordoned
            if cordoned and self._current:
                self._current.stop(Stop.DRAINED)
        self._woken.set()

    def drain(self) -> None:
        with self._lock:
            self._draining = True
            if self._current:
                self._current.stop(Stop.DRAINED)
        self._woken.set()

    def run(self) -> None:
        while True:
            self._woken.clear()
            while not self._draining and not self._cordoned and self._run_one():
                pass
            if self._draining:  # checked after the clear, which may have dropped a drain's wake-up
                return
            self._woken.wait(self._settings.poll_s * random.uniform(0.9, 1.1))

    def _run_one(self) -> bool:
        """Take one piece of work and do it. Returns False if there was none, or the database is away."""
        try:
            work = self._take(self._sessions, self._settings, self._worker)
        except SQLAlchemyError as error:
            logger.warning("cannot look for work, the database is unavailable (%s)", reason_of(error))
            return False
        if work is None:
            return False
        try:
            self._run(work)
        except Exception:  # a slot never dies: the lease runs out, and the reaper gives the work another chance
            logger.exception("%s: the attempt failed", self._worker)
        return True

    def _run(self, work: Work) -> None:
        with self._lock:
            self._current = work
            if self._draining or self._cordoned:
                work.stop(Stop.DRAINED)
        try:
            work.execute()
        finally:
            with self._lock:
                self._current = None


def remove_stale_attempts(session: Session, settings: Settings, *, has_room: bool) -> None:
    """Delete the folders of attempts that no worker holds any more: their worker was killed, or their job has ended.

    The files from which a job resumes stay in place: another worker may take them at this moment. Those of a failed job
    are kept until ``progress_kept_until``, but only as long as the disk ``has_room``.
    """
    for folder, (chat_id, fence) in workspace.list_chats(settings).items():
        if not chat_leases.is_held(session, chat_id, fence):
            shutil.rmtree(folder, ignore_errors=True)
    launched = workspace.list_launches(settings)  # their engines outlive their workers
    # listed before the query: a folder made later is not touched
    attempts = {folder: who for folder, who in workspace.list_attempts(settings).items() if folder not in launched}
    between = workspace.list_between_attempts(settings)
    ids = {job_id for job_id, _ in attempts.values()} | set(between.values())
    jobs = _jobs(session, ids)
    may_go_on = {job.id for job in jobs if job.state not in FINAL or (has_room and keeps_progress(job))}
    held = {(job.id, job.fence) for job in jobs if job.state in HELD}
    for folder, attempt in attempts.items():
        if attempt not in held:
            workspace.remove_attempt(folder, may_go_on=attempt[0] in may_go_on)
    for folder, job_id in between.items():
        if job_id not in may_go_on:
            shutil.rmtree(folder, ignore_errors=True)


def find_orphans(session: Session, settings: Settings) -> dict[Path, bool]:
    """Return the attempts whose engine a scheduler may still run, though nobody will ask for them any more.

    Folder of the attempt -> whether what it has saved is kept, for a retry.
    """
    launched = workspace.list_launches(settings)
    jobs = {job.id: job for job in _jobs(session, set(launched.values()))}
    orphans = {}
    for folder, job_id in launched.items():
        job = jobs.get(job_id)
        if job is None or job.state not in CLAIMABLE | HELD:
            orphans[folder] = job is not None and (job.state not in FINAL or keeps_progress(job))
    return orphans


def end_orphans(launcher: Launcher, orphans: Mapping[Path, bool]) -> None:
    """Cancel the allocations, and delete their folders when they have ended."""
    for folder, may_go_on in orphans.items():
        try:
            if allocation.end(launcher, workspace.launch_dir(folder)):
                workspace.remove_attempt(folder, may_go_on=may_go_on)
                shutil.rmtree(workspace.launch_dir(folder), ignore_errors=True)
        except LauncherAway as error:
            logger.warning("cannot end what %s runs for %s: %s", launcher.name, folder.name, error)


def _jobs(session: Session, ids: Collection[str]) -> Sequence[Job]:
    """Return what their folders depend on, of the jobs that are there."""
    if not ids:
        return ()
    needed = load_only(Job.fence, Job.state, Job.attempt, Job.error, Job.finished_at)  # this runs every few seconds
    return session.scalars(select(Job).options(needed).where(Job.id.in_(ids))).all()


def keeps_progress(job: Job) -> bool:
    """Return whether a retry of the failed ``job`` would continue after its last saved block."""
    until = job.progress_kept_until
    return until is not None and datetime.now(UTC) < until
