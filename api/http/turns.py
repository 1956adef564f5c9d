"""Schedules expensive work: projects take turns, so that one which asks for a lot waits for itself alone.

A few pieces of work run at once, at most one for each project. The project that has used least time lately goes first,
and of those that have used little one more runs beside the others: so a short piece of work never waits for the long
ones of others. Waiting takes no thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from fastapi import Request

from api.http.errors import Problem

NUM_AT_ONCE = 2  # more would be slower, not faster, and take the memory of the jobs
NUM_SHORT = 1  # beside them, of projects whose work has been short
SHORT_S = 15.0
BYTES_PER_S = 10e6  # of a file that is read, as an estimate before its time is known
HALF_LIFE_S = 300.0  # after this time, half of the time that a project has used is forgotten
MAX_WAITING = 32  # of a project
MAX_WAIT_S = 360.0  # longer than the longest piece of work
LOOK_S = 0.5  # interval of the checks whether the client has gone

T = TypeVar("T")


class Turn(asyncio.Future[None]):
    """A place in a project's line, which is done when its turn comes. ``seconds``: how long it may take."""

    seconds = 0.0


class Turns:
    """The turns of one process. Lives in the app's event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Turn]] = {}
        self._busy: set[str] = set()
        self._used: dict[str, tuple[float, float]] = {}  # the seconds that a project has used, at what time

    @asynccontextmanager
    async def take(self, project_id: str, num_bytes: int = 0) -> AsyncIterator[None]:
        """Wait for a turn of the project, to read ``num_bytes``, and hold it. Raises Problem 503 ``busy``."""
        mine = Turn(loop=asyncio.get_running_loop())
        mine.seconds = num_bytes / BYTES_PER_S
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
        began = time.monotonic()
        try:
            yield
        finally:
            self._used[project_id] = self._used_s(project_id) + time.monotonic() - began, time.monotonic()
            self._release(project_id)

    def _release(self, project_id: str) -> None:
        self._busy.discard(project_id)
        self._admit()

    def _admit(self) -> None:
        """Give turns as long as there is a place for the project that comes next."""
        while expected_s := self._expected_s():
            project_id = min(expected_s, key=lambda name: expected_s[name])  # of equal ones who came first
            num_places = NUM_AT_ONCE + (NUM_SHORT if expected_s[project_id] < SHORT_S else 0)
            if len(self._busy) >= num_places:
                return
            line = self._waiting.pop(project_id)
            line.popleft().set_result(None)
            self._busy.add(project_id)
            if line:
                self._waiting[project_id] = line  # behind the others

    def _expected_s(self) -> dict[str, float]:
        """Return what each project that may have a turn would have used after it, in the order of their coming."""
        for project_id, line in list(self._waiting.items()):
            while line and line[0].done():  # it left
                line.popleft()
            if not line:
                del self._waiting[project_id]
        waiting = {name: line[0] for name, line in self._waiting.items() if name not in self._busy}
        return {name: self._used_s(name) + first.seconds for name, first in waiting.items()}

    def _used_s(self, project_id: str) -> float:
        seconds, at = self._used.get(project_id, (0.0, 0.0))
        left_s = float(seconds * 0.5 ** ((time.monotonic() - at) / HALF_LIFE_S))
        if left_s < 0.01:
            self._used.pop(project_id, None)
        return left_s


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
        "Too many of the project's files are waiting to be read.",
        hint="Wait until some of them are done, then send this one again.",
        headers={"Retry-After": "5"},
    )
