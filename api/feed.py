"""Who waits for news of a job is woken when there is some.

A waiting stream holds no thread and no connection: one task of the app asks once a tick, for all jobs that somebody
watches, for their newest events. Streams that then want to read the same share one reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api.store import events
from api.store.engine import Sessions

logger = logging.getLogger(__name__)

TICK_S = 0.5

T = TypeVar("T")


class Feed:
    """Wakes the streams of a job when it has news. Lives in the app's event loop; asks only while somebody watches."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._heads: dict[str, int] = {}  # job id -> the newest event that its watchers were told of
        self._under_way: dict[str, dict[Hashable, asyncio.Future[Any]]] = {}  # readings since the job's last news
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @contextmanager
    def watch(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the job may have news. Watch first, clear it, look, and then wait for it."""
        news = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(news)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield news
        finally:
            self._watchers[job_id].discard(news)
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

    async def _run(self) -> None:
        while self._watchers and not self._stopping.is_set():
            try:
                heads = await run_in_threadpool(self._read_heads, list(self._watchers))
            except SQLAlchemyError as error:
                logger.warning("streams wait: the database is away (%s)", type(error).__name__)
            else:
                self._tell(heads)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    def _read_heads(self, watched: Sequence[str]) -> dict[str, int]:
        with self._sessions.begin() as session:
            return events.find_heads(session, watched)

    def _tell(self, heads: dict[str, int]) -> None:
        for job_id, watchers in self._watchers.items():
            head = heads.get(job_id, -1)  # -1: the job is gone, which is news as well
            if self._heads.get(job_id) != head:
                self._heads[job_id] = head
                self._under_way[job_id] = {}
                for news in watchers:
                    news.set()
