"""Connections. Every wait has an end, so that a sick database is an error and not a hang."""

from __future__ import annotations

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 10
WAIT_S = 5.0
IDLE_S = 30
"""How long a transaction may do nothing: a process that is suspended in one gives its locks away then."""

Sessions = sessionmaker[Session]


def connect(database_url: str, *, pool_size: int = 10, wait_s: float = WAIT_S) -> Sessions:
    """A factory of sessions on ``postgresql+psycopg://...``. ``with sessions.begin() as session`` is one transaction.

    ``wait_s`` bounds the wait for a connection of the pool, and that for a lock; ``tcp_user_timeout`` bounds what a
    statement timeout cannot: a network that swallows packets.
    """
    limits = {
        "statement_timeout": f"{STATEMENT_TIMEOUT_S}s",
        "lock_timeout": f"{round(1000 * wait_s)}ms",
        "idle_in_transaction_session_timeout": f"{IDLE_S}s",
    }
    engine = create_engine(
        database_url,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=wait_s,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "tcp_user_timeout": STATEMENT_TIMEOUT_S * 1000,
            "options": " ".join(f"-c {name}={value}" for name, value in (limits | {"timezone": "UTC"}).items()),
        },
    )
    return sessionmaker(engine, expire_on_commit=False)


def dispose(sessions: Sessions) -> None:
    """Close the pool behind ``sessions``."""
    sessions.kw["bind"].dispose()
