"""Defines the response bodies for the events and log lines of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from api.store.tables.jobs import Event, LogLine


class EventOut(BaseModel):
    """An event; ``seq`` counts 1, 2, 3 within the job."""

    seq: int
    at: datetime
    kind: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: Event) -> EventOut:
        return cls(seq=event.seq, at=event.at, kind=event.kind, data=event.data)


class EventPage(BaseModel):
    """A page of events, oldest first; ask again with ``after`` = the last ``seq``."""

    data: list[EventOut]
    has_more: bool


class LogLineOut(BaseModel):
    """A line of the log; ``seq`` counts within the job, over all its attempts."""

    seq: int
    at: datetime
    attempt: int
    level: str
    text: str

    @classmethod
    def of(cls, line: LogLine) -> LogLineOut:
        return cls(seq=line.seq, at=line.at, attempt=line.attempt, level=line.level, text=line.text)


class LogPage(BaseModel):
    """A page of the log, oldest line first; ask again with ``after`` = the last ``seq``."""

    data: list[LogLineOut]
    has_more: bool
