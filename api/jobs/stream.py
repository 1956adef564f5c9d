"""Streams a job's events and log lines as server-sent events (of the WHATWG).

Past ones come first, then new ones, until the job has ended and its artifact is no longer on its way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api.http.event_stream import Feed, Ticket
from api.http.security import READ
from api.jobs.event_log import EventOut, LogLineOut
from api.store.accounts.audit import Caller
from api.store.engine import Sessions, reading, reason_of
from api.store.queue import events, jobs, logs, publications
from api.store.states import FINAL
from api.store.tables.jobs import Event, LogLine

logger = logging.getLogger(__name__)

PING_S = 15.0
RETRY_MS = 3000
BATCH = 200
MAX_TEXT = 1 << 18
"""Characters after which a batch ends: many streams of long events would take too much memory."""
PIECE = 1 << 15
"""Characters that are sent at a time. A client that reads slowly keeps one or two of them waiting here."""

T = TypeVar("T", Event, LogLine)


@dataclass(frozen=True)
class News:
    """The news after a number: their text, the last number, if there is more, and the state in which the job ended."""

    text: str
    last: int
    more: bool
    ended: str | None


@dataclass(frozen=True)
class Start:
    """The start of a stream: after the event or line with this number."""

    after: int
    ticket: Ticket


def tell_events(feed: Feed, sessions: Sessions, job_id: str, start: Start) -> AsyncIterator[str]:
    """Stream the events from ``start`` on as they come, in the format of EventSource.

    The stream ends after the job's end, and with the key that opened it.
    """
    return tell(feed, job_id, start, "events", partial(_read, sessions, job_id))


def tell_log(feed: Feed, sessions: Sessions, job_id: str, start: Start, level: str) -> AsyncIterator[str]:
    """Stream the lines of at least ``level`` from ``start`` on, in the same way."""
    return tell(feed, job_id, start, level, partial(_read_log, sessions, job_id, level))


async def tell(
    feed: Feed, job_id: str, start: Start, what: Hashable, read: Callable[[int], News]
) -> AsyncIterator[str]:
    """Stream what ``read`` returns after the number ``start``, whenever the job, or the chat, has news."""
    after = start.after
    yield f"retry: {RETRY_MS}\n\n"
    with feed.watch(job_id, start.ticket) as watch:
        while not watch.is_over:  # its client reconnects, and is told why
            watch.news.clear()
            try:
                news = await feed.read(job_id, start.ticket.project_id, (what, after), partial(read, after))
            except SQLAlchemyError as error:  # the client reconnects with the number of the last one it has
                logger.warning("a stream ends, the database is away (%s)", reason_of(error))
                return
            for start_of in range(0, len(news.text), PIECE):
                await feed.give_way(start.ticket.project_id)
                yield news.text[start_of : start_of + PIECE]
            after = news.last
            if news.more:
                continue
            if news.ended is not None:
                yield f'event: end\ndata: {{"state": "{news.ended}"}}\n\n'
                return
            while not await _set_within(watch.news, PING_S):
                yield ": nothing new\n\n"


def find_start(feed: Feed, sessions: Sessions, job_id: str, after: int, caller: Caller) -> Start | None:
    """Return the start of a stream; None if the job has ended with no event after ``after``. Raises QuotaExceeded."""
    return _find_start(feed, sessions, _read(sessions, job_id, after, batch=0), after, caller)


def find_log_start(feed: Feed, sessions: Sessions, job_id: str, after: int, caller: Caller, level: str) -> Start | None:
    """Return the start of a stream as ``find_start`` does, for lines of at least ``level``."""
    return _find_start(feed, sessions, _read_log(sessions, job_id, level, after, batch=0), after, caller)


def _find_start(feed: Feed, sessions: Sessions, news: News, after: int, caller: Caller) -> Start | None:
    if is_over(news, after):
        return None
    with reading(sessions) as session:
        return Start(after, feed.admit(session, caller, READ))


def is_over(news: News, after: int) -> bool:
    """Return True if there is nothing after the number ``after``, and nothing will come."""
    return news.ended is not None and news.last == after and not news.more


def _read(sessions: Sessions, job_id: str, after: int, batch: int = BATCH) -> News:
    read = partial(events.read, job_id=job_id, after=after, limit=batch + 1)
    return _find(sessions, job_id, after, batch, read, _format)


def _read_log(sessions: Sessions, job_id: str, level: str, after: int, batch: int = BATCH) -> News:
    read = partial(logs.read, job_id=job_id, level=level, after=after, limit=batch + 1)
    return _find(sessions, job_id, after, batch, read, _format_line)


def _find(
    sessions: Sessions,
    job_id: str,
    after: int,
    batch: int,
    read: Callable[[Session], Sequence[T]],
    show: Callable[[T], str],
) -> News:
    """Return the news. The state is read first: a client that sees the end has everything before it."""
    with reading(sessions) as session:
        job = jobs.find(session, job_id)
        if job is None:
            return News("", after, False, "deleted")
        ended = job.state if job.state in FINAL and not publications.is_open(session, job_id) else None
        rows = read(session)
    texts: list[str] = []
    for row in rows[:batch]:
        texts.append(show(row))
        if sum(map(len, texts)) > MAX_TEXT:
            break
    last = rows[len(texts) - 1].seq if texts else after
    return News("".join(texts), last, len(rows) > len(texts), ended)


def _format(event: Event) -> str:
    kind = re.sub(r"[^\w.-]", "_", event.kind)  # it comes from the engine: it must not start a line of its own
    return f"id: {event.seq}\nevent: {kind}\ndata: {EventOut.of(event).model_dump_json()}\n\n"


def _format_line(line: LogLine) -> str:
    return f"id: {line.seq}\nevent: line\ndata: {LogLineOut.of(line).model_dump_json()}\n\n"


async def _set_within(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return False
    return True
