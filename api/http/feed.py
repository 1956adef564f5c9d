"""Who waits for news of a job is woken when there is some.

A waiting stream holds no thread and no connection: one task of the app asks once a tick, for all jobs that somebody
watches, for their newest events. Streams that then want to read the same share one reading. Every few ticks it also
asks whether the keys and sign-ins that opened the streams still would: the others' streams end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.http.stream_seats import RENEW_S, StreamSeats
from api.store.accounts import projects, signins
from api.store.accounts.audit import Caller, Shown
from api.store.engine import Sessions
from api.store.queue import events
from api.store.tables.jobs import Project

logger = logging.getLogger(__name__)

TICK_S = 0.5
CHECK_S = 2.0
"""A stream ends so soon after the key that opened it, and a tick later at most."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ticket:
    """What a stream was opened with: it lasts as long as ``shown`` has the ``scope``. Its seat is ``stream_seats``'."""

    project_id: str
    shown: Shown
    scope: str
    seat: str


@dataclass(eq=False)
class Watch:
    """One stream: ``news`` is set when its job may have some, or when it ``is_over``: its key opens it no more."""

    ticket: Ticket
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False


class Feed:
    """Wakes the streams of a job when it has news. Lives in the app's event loop; asks only while somebody watches."""

    def __init__(self, sessions: Sessions, seats: StreamSeats) -> None:
        self._sessions = sessions
        self._seats = seats
        self._watchers: dict[str, set[Watch]] = {}
        self._check_at = self._renew_at = 0.0
        self._left: list[Ticket] = []  # of streams that have ended
        self._heads: dict[str, int] = {}  # job id -> the newest event that its watchers were told of
        self._under_way: dict[str, dict[Hashable, asyncio.Future[Any]]] = {}  # readings since the job's last news
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def admit(self, session: Session, caller: Caller, scope: str) -> Ticket:
        """For one more stream of the caller's project. Raises QuotaExceeded."""
        assert caller.shown is not None
        limit = projects.limit_of(session.get_one(Project, caller.project_id), "max_streams")
        seat = self._seats.take(caller.project_id, limit, self._count_here(caller.project_id))
        return Ticket(caller.project_id, caller.shown, scope, seat)

    def count_streams(self, project_id: str) -> int:
        return self._seats.count(project_id, self._count_here(project_id))

    @contextmanager
    def watch(self, job_id: str, ticket: Ticket) -> Iterator[Watch]:
        """For a stream. Watch first, clear the news, look, and then wait for them."""
        watch = Watch(ticket)
        self._watchers.setdefault(job_id, set()).add(watch)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield watch
        finally:
            self._watchers[job_id].discard(watch)
            self._left.append(ticket)
            if not self._watchers[job_id]:
                del self._watchers[job_id]
                self._heads.pop(job_id, None)
                self._under_way.pop(job_id, None)

    async def read(self, job_id: str, what: Hashable, read: Callable[[], T]) -> T:
        """What ``read()`` returns, in a thread: once for all streams that ask for the same ``what`` at the same time.

        Never a reading that began before the job's last news: a stream that has cleared its event and asks sees them.
        """
        under_way = self._under_way.setdefault(job_id, {})
        if (reading := under_way.get(what)) is None:
            reading = under_way[what] = asyncio.ensure_future(run_in_threadpool(read))
            reading.add_done_callback(lambda _: under_way.pop(what))
        return await asyncio.shield(reading)  # one that leaves does not end it for others

    async def stop(self) -> None:
        """The app ends: ask no more. Waited for and not cancelled: its question may hold a connection of the pool."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        await run_in_threadpool(self._keep_seats, {})
        self._seats.close()

    async def _run(self) -> None:
        while (self._watchers or self._left) and not self._stopping.is_set():
            if (taken := self._taken_seats()) or self._left:
                await run_in_threadpool(self._keep_seats, taken)
            try:
                heads, scopes = await run_in_threadpool(self._look, list(self._watchers), self._shown_to_check())
            except SQLAlchemyError as error:
                logger.warning("streams wait: the database is away (%s)", type(error).__name__)
            else:
                self._end_those_without(scopes)
                self._tell(heads)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    def _look(
        self, watched: Sequence[str], shown: Collection[Shown]
    ) -> tuple[dict[str, int], dict[Shown, frozenset[str]]]:
        """The newest event of each job, and of each of ``shown`` the scopes that it now opens."""
        with self._sessions.begin() as session:
            found = signins.find_open(session, shown) if shown else {}
            return events.find_heads(session, watched), {each: found.get(each, frozenset()) for each in shown}

    def _shown_to_check(self) -> Collection[Shown]:
        """What has opened the streams, every ``CHECK_S`` seconds."""
        if time.monotonic() < self._check_at:
            return ()
        return {watch.ticket.shown for watch in self._all()}

    def _end_those_without(self, scopes: Mapping[Shown, frozenset[str]]) -> None:
        if not scopes:
            return
        self._check_at = time.monotonic() + CHECK_S
        for watch in self._all():
            ticket = watch.ticket
            if ticket.scope not in scopes.get(ticket.shown, (ticket.scope,)):  # one that came since is asked about next
                watch.is_over = True
                watch.news.set()

    def _tell(self, heads: dict[str, int]) -> None:
        for job_id, watchers in self._watchers.items():
            head = heads.get(job_id, -1)  # -1: the job is gone, which is news as well
            if self._heads.get(job_id) != head:
                self._heads[job_id] = head
                self._under_way[job_id] = {}
                for watch in watchers:
                    watch.news.set()

    def _all(self) -> list[Watch]:
        return [watch for watchers in list(self._watchers.values()) for watch in list(watchers)]

    def _count_here(self, project_id: str) -> int:
        return sum(watch.ticket.project_id == project_id for watch in self._all())

    def _taken_seats(self) -> dict[str, list[str]]:
        """The seats of all streams by project, if it is time to renew them."""
        if time.monotonic() < self._renew_at:
            return {}
        self._renew_at = time.monotonic() + RENEW_S
        taken: dict[str, list[str]] = {}
        for watch in self._all():
            taken.setdefault(watch.ticket.project_id, []).append(watch.ticket.seat)
        return taken

    def _keep_seats(self, taken: dict[str, list[str]]) -> None:
        self._seats.renew(taken)
        while self._left:  # after the renewal, which may have been of them, too
            ticket = self._left.pop()
            self._seats.leave(ticket.project_id, ticket.seat)
