"""Schedules expensive work: projects take turns, so that one which asks for a lot waits for itself alone.

A few pieces of work run at once, at most one for each project. Waiting takes no thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from anyio import from_thread
from fastapi import Request

from api.http.errors import Problem

NUM_AT_ONCE = 2  # more would be slower, not faster, and take the memory of the jobs
MAX_WAITING = 32  # of a project
MAX_WAIT_S = 120.0
LOOK_S = 0.5  # interval of the checks whether the client has gone

T = TypeVar("T")


class Turns:
    """The turns of one process. Lives in the app's event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which projects get their turn
        self._busy: set[str] = set()

    @asynccontextmanager
    async def take(self, project_id: str) -> AsyncIterator[None]:
        """Wait for a turn of the project, and hold it. Raises Problem 503 ``busy``."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(project_id, deque())
        if len(line) >= MAX_WAITING:
            raise _busy()
        line.append(mine)
        self._admit()
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await mine
        except BaseException as error:
            if mine.cancelled():
                with suppress(ValueError):
                    line.remove(mine)
            else:  # its turn came in the same moment
                self._release(project_id)
            if isinstance(error, TimeoutError):
                raise _busy() from error
            raise
        try:
            yield
        finally:
            self._release(project_id)

    @contextmanager
    def hold(self, project_id: str) -> Iterator[None]:
        """Do as ``take`` in a thread of the pool that runs plain endpoints."""
        turn = self.take(project_id)
        from_thread.run(turn.__aenter__)
        try:
            yield
        finally:
            from_thread.run(turn.__aexit__, None, None, None)

    def _release(self, project_id: str) -> None:
        self._busy.discard(project_id)
        self._admit()

    def _admit(self) -> None:
        for project_id in list(self._waiting):
            if len(self._busy) >= NUM_AT_ONCE:
                return
            if project_id in self._busy:
                continue
            line = self._waiting.pop(project_id)
            while line and (first := line.popleft()):
                if not first.cancelled():
                    first.set_result(None)
                    self._busy.add(project_id)
                    break
            if line:
                self._waiting[project_id] = line  # behind the others


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it when the client disconnects. Raises Problem 503 ``client_gone``."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if not task.done() and await request.is_disconnected():
                raise Problem(503, "client_gone", "The client has closed its connection.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _busy() -> Problem:
    return Problem(
        503,
        "busy",
        "Too many files of the project are waiting to be read.",
        hint="Wait until some of them are done, and send this one again.",
        headers={"Retry-After": "5"},
    )
