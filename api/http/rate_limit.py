"""Limits the number of requests that a project may send within a minute.

All processes of the API count together, in the broker: a counter that expires after a minute. While the broker is away
each counts for itself (so n processes let n times as many through): the limit stops a program that has gone wild, and
must not become the reason why nobody is served. A limit that must hold exactly is a quota (``projects``). The headers
are those of draft-ietf-httpapi-ratelimit-headers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import redis

from api.store import broker
from quantcore.config.time_limits import BROKER_COUNT_S

logger = logging.getLogger(__name__)

WINDOW_S = 60
KEY = "bitfoundry:requests:"
AWAY_S = 5.0  # after a failure the broker is not asked for this long


@dataclass(frozen=True)
class Rate:
    """The rest of the present window after a request, and the seconds until the next one."""

    limit: int
    remaining: int
    reset_s: int
    exceeded: bool

    @property
    def headers(self) -> dict[str, str]:
        return {
            "RateLimit-Policy": f'"requests";q={self.limit};w={WINDOW_S}',
            "RateLimit": f'"requests";r={self.remaining};t={self.reset_s}',
        }


class RateLimiter:
    """Counts requests; safe to use from several threads. All processes count together in a Redis at ``broker_url``."""

    def __init__(self, broker_url: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self._shared = broker.connect(broker_url, BROKER_COUNT_S)
        self._away_until = 0.0
        self._now = now
        self._lock = threading.Lock()
        self._window = 0
        self._counts: defaultdict[str, int] = defaultdict(int)

    def count(self, project_id: str, limit: int) -> Rate:
        """Count one more request of the project."""
        used, reset_s = self._count_together(project_id) or self._count_here(project_id)
        return Rate(limit, max(0, limit - used), reset_s, exceeded=used > limit)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _count_together(self, project_id: str) -> tuple[int, int] | None:
        """Count for all processes: (requests in this window, seconds until the next). None while the broker is away."""
        if self._shared is None or self._now() < self._away_until:
            return None
        key = KEY + project_id
        try:
            with self._shared.pipeline() as steps:  # in one go: a counter without an end would lock a project out
                steps.set(key, 0, ex=WINDOW_S, nx=True)
                steps.incr(key)
                steps.pttl(key)
                _, used, left_ms = steps.execute()
        except redis.ResponseError:  # a stranger's key, of another type
            self._forget(key)
            return None
        except redis.RedisError as error:
            self._away_until = self._now() + AWAY_S
            logger.warning("requests are counted by each process for itself: no broker (%s)", type(error).__name__)
            return None
        if not 0 <= left_ms <= 1000 * WINDOW_S:  # a stranger's key, which would lock the project out for ever
            self._forget(key)
            return None
        return int(used), max(1, round(left_ms / 1000))

    def _forget(self, key: str) -> None:
        with suppress(redis.RedisError):
            if self._shared is not None:
                self._shared.delete(key)

    def _count_here(self, project_id: str) -> tuple[int, int]:
        now = self._now()
        window = int(now // WINDOW_S)
        with self._lock:
            if window != self._window:
                self._window = window
                self._counts.clear()
            self._counts[project_id] += 1
            used = self._counts[project_id]
        return used, max(1, round((window + 1) * WINDOW_S - now))
