"""A job's story and its log as server-sent events (of the WHATWG): what was, then what comes, until the job has ended
and its artifact is no longer on its way."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.feed import Feed
from api.jobs.story import EventOut, LogLineOut
from api.store import events, jobs, logs, publications
from api.store.engine import Sessions
from api.store.states import FINAL
from api.store.tables import Event, LogLine

logger = logging.getLogger(__name__)

PING_S = 15.0
RETRY_MS = 3000
BATCH = 500

T = TypeVar("T", Event, LogLine)
Found = tuple[Sequence[T], bool, str | None]  # what came, whether there is more, the state in which the job ended


def tell_story(feed: Feed, sessions: Sessions, job_id: str, after: int) -> AsyncIterator[str]:
    """The events after number ``after`` as they come, in the format of EventSource; ends after the job's end."""
    return _tell(feed, job_id, after, partial(_read, sessions, job_id), _format)


def tell_log(feed: Feed, sessions: Sessions, job_id: str, after: int, level: str) -> AsyncIterator[str]:
    """The lines of at least ``level`` after number ``after``, in the same way."""
    return _tell(feed, job_id, after, partial(_read_log, sessions, job_id, level), _format_line)


async def _tell(
    feed: Feed, job_id: str, after: int, read: Callable[[int], Found[T]], show: Callable[[T], str]
) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    with feed.watch(job_id) as news:
        while True:
            news.clear()
            try:
                found, more, ended = await run_in_threadpool(read, after)
            except SQLAlchemyError as error:  # the client comes back with the number of the last one it has
                logger.warning("a stream ends, the database is away (%s)", type(error).__name__)
                return
            for each in found:
                after = each.seq
                yield show(each)
            if more:
                continue
            if ended is not None:
                yield f'event: end\ndata: {{"state": "{ended}"}}\n\n'
                return
            while not await _set_within(news, PING_S):
                yield ": nothing new\n\n"


def has_ended(sessions: Sessions, job_id: str, after: int) -> bool:
    """Whether the job has ended and nothing came after event ``after``."""
    return _is_over(_read(sessions, job_id, after))


def has_log_ended(sessions: Sessions, job_id: str, after: int, level: str) -> bool:
    """Whether the job has ended and no line of at least ``level`` came after number ``after``."""
    return _is_over(_read_log(sessions, job_id, level, after))


def _is_over(read: Found[T]) -> bool:
    found, more, ended = read
    return ended is not None and not found and not more


def _read(sessions: Sessions, job_id: str, after: int) -> Found[Event]:
    return _found(sessions, job_id, lambda session: events.read(session, job_id, after=after, limit=BATCH + 1))


def _read_log(sessions: Sessions, job_id: str, level: str, after: int) -> Found[LogLine]:
    return _found(
        sessions, job_id, lambda session: logs.read(session, job_id, level=level, after=after, limit=BATCH + 1)
    )


def _found(sessions: Sessions, job_id: str, read: Callable[[Session], Sequence[T]]) -> Found[T]:
    """The state is read first: whoever sees the end has everything before it."""
    with sessions.begin() as session:
        job = jobs.find(session, job_id)
        if job is None:
            return [], False, "deleted"
        ended = job.state if job.state in FINAL and not publications.is_open(session, job_id) else None
        found = read(session)
    return found[:BATCH], len(found) > BATCH, ended


def _format(event: Event) -> str:
    kind = re.sub(r"[^\w.-]", "_", event.kind)  # an engine's word: it must not start a line of its own
    return f"id: {event.seq}\nevent: {kind}\ndata: {EventOut.of(event).model_dump_json()}\n\n"


def _format_line(line: LogLine) -> str:
    return f"id: {line.seq}\nevent: line\ndata: {LogLineOut.of(line).model_dump_json()}\n\n"


async def _set_within(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return False
    return True
