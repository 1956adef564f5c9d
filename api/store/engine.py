"""Connects to the database. Every wait has an end, so that a sick database is an error and not a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import InterfaceError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from quantcore.config.time_limits import (
    DATABASE_ANSWER_S,
    DATABASE_CONNECT_S,
    DATABASE_IDLE_S,
    DATABASE_SILENT_S,
    DATABASE_WAIT_S,
)

POOL_SIZE = 5
"""Number of connections of a process; a thread that finds them all busy waits. Python runs one thread at a time: twenty
that work at once take half as much CPU again for the same work as these few, and longer."""
FRESH_S = 1.0
"""Time since its last use in which a connection is taken to be alive; others are pinged, which costs a round trip."""

Sessions = sessionmaker[Session]


def connect(
    database_url: str,
    *,
    pool_size: int = POOL_SIZE,
    wait_s: float = DATABASE_WAIT_S,
    answer_s: float = DATABASE_ANSWER_S,
) -> Sessions:
    """Return a factory of sessions on ``postgresql+psycopg://...``. ``with sessions.begin()`` is one transaction.

    ``wait_s`` bounds the wait for a connection of the pool, and that for a lock; ``answer_s`` the server's time for a
    statement. A second later we ourselves hang up: a server that is stopped, and a network that drops packets, keep no
    limit of their own.
    """
    limits = {
        "statement_timeout": f"{round(1000 * answer_s)}ms",
        "lock_timeout": f"{round(1000 * wait_s)}ms",
        "idle_in_transaction_session_timeout": f"{DATABASE_IDLE_S}s",
    }
    engine = create_engine(
        database_url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=wait_s,
        connect_args={
            "connect_timeout": DATABASE_CONNECT_S,
            "options": " ".join(f"-c {name}={value}" for name, value in (limits | {"timezone": "UTC"}).items()),
        },
    )
    _hang_up_on_silence(engine, answer_s + DATABASE_SILENT_S)
    _ask_whether_alive(engine)
    _count_read_only_as_away(engine)
    return sessionmaker(engine, expire_on_commit=False)


@contextmanager
def reading(sessions: Sessions) -> Iterator[Session]:
    """Yield a session in which each query is its own transaction, which saves two round trips.

    As in a transaction at READ COMMITTED, each query sees what was committed before it.
    """
    with sessions() as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        yield session


def dispose(sessions: Sessions) -> None:
    """Close the pool behind ``sessions``."""
    sessions.kw["bind"].dispose()


def reason_of(error: Exception) -> str:
    """Return the kind of a database error and, if the connection is at fault, the driver's message.

    The messages of other errors may quote values.
    """
    kind, cause = type(error).__name__, getattr(error, "orig", None)
    if cause is None or not isinstance(error, OperationalError | InterfaceError):
        return kind
    return f"{kind}: {str(cause).partition(chr(10))[0]}"


def _ask_whether_alive(engine: Engine) -> None:
    """Ping an idle connection of the pool before its use. If it is dead, replace all connections."""

    @event.listens_for(engine, "checkin")
    def note(connection: Any, record: Any) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: Any, proxy: Any) -> None:
        idle_s = time.monotonic() - record.info.get("used_at", time.monotonic())
        if idle_s > FRESH_S:
            try:
                engine.dialect.do_ping(connection)
            except psycopg.Error as error:
                raise InvalidatePoolError from error


class DatabaseReadOnly(OperationalError):
    """The database rejects writes: it is a standby, or its operator has made it so. For a writer it is away."""


def _count_read_only_as_away(engine: Engine) -> None:
    @event.listens_for(engine, "handle_error")
    def replace(context: Any) -> None:
        error = context.original_exception
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            raise DatabaseReadOnly(context.statement, None, error) from error


class _SilenceError(psycopg.OperationalError):
    pass


def _end_in_silence(gen: Any, patience_s: float, tick_s: float) -> Generator[Any, Any, Any]:
    """Drive ``gen``, a wait of psycopg's, which looks every ``tick_s`` whether something came.

    Raise _SilenceError if nothing came for ``patience_s``, counted in ticks. No clock is read: it would count the time
    in which this process or the whole machine stood still, too.
    """
    num_ticks, max_ticks = 0, round(patience_s / tick_s)
    try:
        wanted = next(gen)
        while num_ticks < max_ticks:
            ready = yield wanted
            num_ticks = 0 if ready else num_ticks + 1
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value
    raise _SilenceError(f"the server sent nothing for {patience_s:g} s")


def _hang_up_on_silence(engine: Engine, patience_s: float) -> None:
    """End a wait in which the server sends nothing for ``patience_s``.

    While a server is silent one thread at a time tries to reach it, and all others learn at once that it is away.
    """
    silent_until = 0.0  # 0: it is not silent
    trying = threading.Lock()

    def note_silence() -> None:
        nonlocal silent_until
        silent_until = time.monotonic() + DATABASE_SILENT_S

    class ImpatientConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            if timeout is not None:
                return super().wait(gen, interval, timeout)
            try:
                return super().wait(_end_in_silence(gen, patience_s, interval), interval)
            except _SilenceError:
                self.pgconn.finish()  # so that nobody waits for it again; SQLAlchemy then drops the whole pool
                note_silence()
                raise

    @event.listens_for(engine, "do_connect")
    def reach(dialect: Any, record: Any, arguments: Any, named: Any) -> Any:
        nonlocal silent_until
        if not silent_until:
            return _reach(arguments, named)
        if time.monotonic() < silent_until or not trying.acquire(blocking=False):
            raise psycopg.OperationalError("the database has not answered lately")
        try:
            connection = _reach(arguments, named)
            silent_until = 0.0
            return connection
        finally:
            trying.release()

    def _reach(arguments: Any, named: Any) -> Any:
        try:
            return ImpatientConnection.connect(*arguments, **named)
        except psycopg.errors.ConnectionTimeout:
            note_silence()
            raise
