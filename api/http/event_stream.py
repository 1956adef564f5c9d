"""Wakes the streams of a job when the job has new events, and those of a chat when it has changed.

A waiting stream holds no thread and no connection. One task of the app polls the newest events of all watched jobs.
Streams that then read the same rows share one read. Every few ticks the task also checks whether the keys and sign-ins
that opened the streams are still valid, and ends the streams of those that are not.
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

from api.http.errors import Problem
from api.http.stream_permits import RENEW_S, StreamPermits
from api.store.accounts import projects, signins
from api.store.accounts.audit import Caller, Shown
from api.store.engine import Sessions, reason_of
from api.store.queue import chats, events
from api.store.tables.jobs import Project

logger = logging.getLogger(__name__)

TICK_S = 0.5
MAX_STREAMS_OF_KEY = 200
"""Open streams of a key in a process: a quarter of its connections (``connection_limits.MAX_CONNECTIONS``)."""
CHECK_S = 2.0
"""Seconds between two checks of the keys; a stream ends at most this and one tick after its key."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ticket:
    """The right to stream: valid as long as the credentials ``shown`` have the ``scope``; holds a ``permit``."""

    project_id: str
    shown: Shown
    scope: str
    permit: str


@dataclass(eq=False)
class Watch:
    """An open stream. ``news`` is set when its job may have new events, or when its key has expired (``is_over``)."""

    ticket: Ticket
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False


class Feed:
    """Wakes the streams of a job. Lives in the app's event loop; polls only while there are streams."""

    def __init__(self, sessions: Sessions, permits: StreamPermits) -> None:
        self._sessions = sessions
        self._permits = permits
        self._watchers: dict[str, set[Watch]] = {}
        self._check_at = self._renew_at = 0.0
        self._ended: list[Ticket] = []  # their permits are still held
        self._heads: dict[str, int] = {}  # job id -> the newest event that its watchers were told of
        self._under_way: dict[str, dict[Hashable, asyncio.Future[Any]]] = {}  # readings since the job's last news
        self._turns: dict[str, asyncio.Lock] = {}  # by project
        self._sending: dict[str, asyncio.Lock] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def admit(self, session: Session, caller: Caller, scope: str) -> Ticket:
        """Return the ticket for a new stream of the caller's project.

        Raises QuotaExceeded, and Problem 429 ``too_many_streams`` for a key with too many of them.
        """
        assert caller.shown is not None
        num_of_key = sum(watch.ticket.shown.key_id == caller.key_id for watch in self._all())
        if num_of_key >= MAX_STREAMS_OF_KEY:
            raise Problem(
                429,
                "too_many_streams",
                f"This key has {num_of_key} open streams; the limit is {MAX_STREAMS_OF_KEY}.",
                hint="Close some of them. To follow many jobs, poll GET /v1/jobs instead of opening a stream for each.",
                headers={"Retry-After": "60"},
            )
        limit = projects.limit_of(session.get_one(Project, caller.project_id), "max_streams")
        permit = self._permits.acquire(caller.project_id, limit, self._count_here(caller.project_id))
        return Ticket(caller.project_id, caller.shown, scope, permit)

    def count_streams(self, project_id: str) -> int:
        return self._permits.count(project_id, self._count_here(project_id))

    @contextmanager
    def watch(self, job_id: str, ticket: Ticket) -> Iterator[Watch]:
        """Register a stream. It then clears ``news``, reads, and waits for ``news``, in this order."""
        watch = Watch(ticket)
        self._watchers.setdefault(job_id, set()).add(watch)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield watch
        finally:
            self._watchers[job_id].discard(watch)
            self._ended.append(ticket)
            if not self._watchers[job_id]:
                del self._watchers[job_id]
                self._heads.pop(job_id, None)
                self._under_way.pop(job_id, None)

    async def read(self, job_id: str, project_id: str, what: Hashable, read: Callable[[], T]) -> T:
        """Return ``read()``, called in a thread, once for all streams that ask for the same ``what`` at the same time.

        A call that began before the job's newest event is not reused, so a stream that was woken sees that event. The
        streams of a project read one after the other, for half of the time at most: many that are behind leave the
        threads, and the processor, to the requests of others.
        """
        under_way = self._under_way.setdefault(job_id, {})
        if (reading := under_way.get(what)) is None:
            reading = under_way[what] = asyncio.ensure_future(self._read_in_turn(project_id, read))
            reading.add_done_callback(lambda _: under_way.pop(what))
        return await asyncio.shield(reading)  # a stream that leaves does not cancel it for others

    async def _read_in_turn(self, project_id: str, read: Callable[[], T]) -> T:
        turn = self._turns.setdefault(project_id, asyncio.Lock())
        await turn.acquire()
        began = time.monotonic()
        try:
            return await run_in_threadpool(read)
        finally:
            asyncio.get_running_loop().call_later(time.monotonic() - began, turn.release)

    async def give_way(self, project_id: str) -> None:
        """Wait until no other stream of the project has sent a piece in this round of the event loop.

        Else the hundreds of streams of one project, woken together, would all send before anybody is answered.
        """
        turn = self._sending.setdefault(project_id, asyncio.Lock())
        await turn.acquire()
        asyncio.get_running_loop().call_soon(turn.release)

    async def stop(self) -> None:
        """Stop polling. The task is awaited, not cancelled: its query may hold a connection of the pool."""
        self._stopping.set()
        if self._task is not None:
            await self._task
        await run_in_threadpool(self._renew_and_release, {})
        self._permits.close()

    async def _run(self) -> None:
        while (self._watchers or self._ended) and not self._stopping.is_set():
            if (due := self._permits_due()) or self._ended:
                await run_in_threadpool(self._renew_and_release, due)
            try:
                heads, scopes = await run_in_threadpool(self._poll, list(self._watchers), self._credentials_due())
            except SQLAlchemyError as error:
                logger.warning("streams wait: the database is unavailable (%s)", reason_of(error))
            else:
                self._end_without_scope(scopes)
                self._tell(heads)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    def _poll(
        self, watched: Sequence[str], shown: Collection[Shown]
    ) -> tuple[dict[str, int], dict[Shown, frozenset[str]]]:
        """Return the newest event of each job or change of each chat, and the present scopes of each ``shown``."""
        with self._sessions.begin() as session:
            scopes = signins.find_open(session, shown) if shown else {}
            heads = events.find_heads(session, watched)
            heads |= chats.find_heads(session, [name for name in watched if name.startswith("chat_")])
            return heads, {each: scopes.get(each, frozenset()) for each in shown}

    def _credentials_due(self) -> Collection[Shown]:
        """Return the credentials of all streams if it is time to check them."""
        if time.monotonic() < self._check_at:
            return ()
        return {watch.ticket.shown for watch in self._all()}

    def _end_without_scope(self, scopes: Mapping[Shown, frozenset[str]]) -> None:
        if not scopes:
            return
        self._check_at = time.monotonic() + CHECK_S
        for watch in self._all():
            ticket = watch.ticket
            if ticket.scope not in scopes.get(ticket.shown, (ticket.scope,)):  # a new stream is checked next time
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

    def _permits_due(self) -> dict[str, list[str]]:
        """Return the permits of all streams by project if it is time to renew them."""
        if time.monotonic() < self._renew_at:
            return {}
        self._renew_at = time.monotonic() + RENEW_S
        permits: dict[str, list[str]] = {}
        for watch in self._all():
            permits.setdefault(watch.ticket.project_id, []).append(watch.ticket.permit)
        return permits

    def _renew_and_release(self, due: dict[str, list[str]]) -> None:
        self._permits.renew(due)
        while self._ended:  # after the renewal, which may have included them
            ticket = self._ended.pop()
            self._permits.release(ticket.project_id, ticket.permit)
