"""Clients of the broker for what Celery does not do. Nothing that must hold depends on it."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def connect(broker_url: str, wait_s: float) -> redis.Redis | None:
    """Return a client for a broker of Celery's that is a Redis (over a unix socket, too), None for other brokers.

    ``wait_s``: for a connection, and for an answer.
    """
    if broker_url.startswith("redis+socket://"):
        broker_url = "unix://" + broker_url.removeprefix("redis+socket://").replace("virtual_host=", "db=")
    if not broker_url.startswith(("redis://", "rediss://", "unix://")):
        return None
    return redis.Redis.from_url(
        broker_url, socket_timeout=wait_s, socket_connect_timeout=wait_s, retry=Retry(NoBackoff(), 0)
    )
