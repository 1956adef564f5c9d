"""A job's story as server-sent events (of the WHATWG): what was, then what comes, until the job has ended and
its artifact is no longer on its way."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api.feed import Feed
from api.jobs.schemas import EventOut
from api.store import events, jobs, publications
from api.store.engine import Sessions
from api.store.states import FINAL
from api.store.tables import Event

logger = logging.getLogger(__name__)

PING_S = 15.0
RETRY_MS = 3000
BATCH = 500


async def tell_story(feed: Feed, sessions: Sessions, job_id: str, after: int) -> AsyncIterator[str]:
    """The events after number ``after`` as they come, in the format of EventSource; ends after the job's end."""
    yield f"retry: {RETRY_MS}\n\n"
    with feed.watch(job_id) as news:
        while True:
            news.clear()
            try:
                found, more, ended = await run_in_threadpool(_read, sessions, job_id, after)
            except SQLAlchemyError as error:  # the client comes back with the number of the last event it has
                logger.warning("a stream ends, the database is away (%s)", type(error).__name__)
                return
            for event in found:
                after = event.seq
                yield _format(event)
            if more:
                continue
            if ended is not None:
                yield f'event: end\ndata: {{"state": "{ended}"}}\n\n'
                return
            while not await _set_within(news, PING_S):
                yield ": nothing new\n\n"


def has_ended(sessions: Sessions, job_id: str, after: int) -> bool:
    """Whether the job has ended and nothing came after event ``after``."""
    found, more, ended = _read(sessions, job_id, after)
    return ended is not None and not found and not more


def _read(sessions: Sessions, job_id: str, after: int) -> tuple[Sequence[Event], bool, str | None]:
    """(events, whether there are more, the state in which the job ended or None). The state is read first: whoever
    sees the end has every event before it."""
    with sessions.begin() as session:
        job = jobs.find(session, job_id)
        if job is None:
            return [], False, "deleted"
        ended = job.state if job.state in FINAL and not publications.is_open(session, job_id) else None
        found = events.read(session, job_id, after=after, limit=BATCH + 1)
    return found[:BATCH], len(found) > BATCH, ended


def _format(event: Event) -> str:
    kind = re.sub(r"[^\w.-]", "_", event.kind)  # an engine's word: it must not start a line of its own
    return f"id: {event.seq}\nevent: {kind}\ndata: {EventOut.of(event).model_dump_json()}\n\n"


async def _set_within(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return False
    return True
