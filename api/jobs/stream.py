"""A job's story and its log as server-sent events (of the WHATWG): what was, then what comes, until the job has ended
and its artifact is no longer on its way."""

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

from api.feed import Feed
from api.jobs.story import EventOut, LogLineOut
from api.security import READ
from api.store import events, jobs, logs, publications
from api.store.audit import Shown
from api.store.engine import Sessions, reading
from api.store.states import FINAL
from api.store.tables import Event, LogLine

logger = logging.getLogger(__name__)

PING_S = 15.0
RETRY_MS = 3000
BATCH = 500

T = TypeVar("T", Event, LogLine)


@dataclass(frozen=True)
class News:
    """What came after a number: as text, the number of the last one, whether there is more, and the state in which the
    job ended."""

    text: str
    last: int
    more: bool
    ended: str | None


def tell_story(feed: Feed, sessions: Sessions, job_id: str, after: int, shown: Shown) -> AsyncIterator[str]:
    """The events after number ``after`` as they come, in the format of EventSource; ends after the job's end, and with
    the key that was ``shown``."""
    return _tell(feed, job_id, after, shown, "story", partial(_read, sessions, job_id))


def tell_log(feed: Feed, sessions: Sessions, job_id: str, after: int, shown: Shown, level: str) -> AsyncIterator[str]:
    """The lines of at least ``level`` after number ``after``, in the same way."""
    return _tell(feed, job_id, after, shown, level, partial(_read_log, sessions, job_id, level))


async def _tell(
    feed: Feed, job_id: str, after: int, shown: Shown, what: Hashable, read: Callable[[int], News]
) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    with feed.watch(job_id, shown, READ) as watch:
        while not watch.is_over:  # its client comes back, and hears why
            watch.news.clear()
            try:
                news = await feed.read(job_id, (what, after), partial(read, after))
            except SQLAlchemyError as error:  # the client comes back with the number of the last one it has
                logger.warning("a stream ends, the database is away (%s)", type(error).__name__)
                return
            if news.text:
                yield news.text
            after = news.last
            if news.more:
                continue
            if news.ended is not None:
                yield f'event: end\ndata: {{"state": "{news.ended}"}}\n\n'
                return
            while not await _set_within(watch.news, PING_S):
                yield ": nothing new\n\n"


def has_ended(sessions: Sessions, job_id: str, after: int) -> bool:
    """Whether the job has ended and nothing came after event ``after``."""
    return _is_over(_read(sessions, job_id, after), after)


def has_log_ended(sessions: Sessions, job_id: str, after: int, level: str) -> bool:
    """Whether the job has ended and no line of at least ``level`` came after number ``after``."""
    return _is_over(_read_log(sessions, job_id, level, after), after)


def _is_over(news: News, after: int) -> bool:
    return news.ended is not None and news.last == after and not news.more


def _read(sessions: Sessions, job_id: str, after: int) -> News:
    read = partial(events.read, job_id=job_id, after=after, limit=BATCH + 1)
    return _find(sessions, job_id, after, read, _format)


def _read_log(sessions: Sessions, job_id: str, level: str, after: int) -> News:
    read = partial(logs.read, job_id=job_id, level=level, after=after, limit=BATCH + 1)
    return _find(sessions, job_id, after, read, _format_line)


def _find(
    sessions: Sessions, job_id: str, after: int, read: Callable[[Session], Sequence[T]], show: Callable[[T], str]
) -> News:
    """The state is read first: whoever sees the end has everything before it."""
    with reading(sessions) as session:
        job = jobs.find(session, job_id)
        if job is None:
            return News("", after, False, "deleted")
        ended = job.state if job.state in FINAL and not publications.is_open(session, job_id) else None
        found = read(session)
    sent = found[:BATCH]
    return News("".join(map(show, sent)), sent[-1].seq if sent else after, len(found) > BATCH, ended)


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
