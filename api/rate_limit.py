"""How many requests a project may send. Counted in windows of a minute that are the same for all projects.

Each process of the API counts for itself: with n of them a project gets up to n times its limit. That keeps a program
that has gone wild from everybody's throat, and costs no round trip; what must hold exactly is a quota (``projects``).
The headers are those of draft-ietf-httpapi-ratelimit-headers.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60


@dataclass(frozen=True)
class Rate:
    """What is left of the present window after a request, and the seconds until the next one."""

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
    """Counts requests; safe to use from several threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._window = 0
        self._counts: defaultdict[str, int] = defaultdict(int)

    def count(self, project_id: str, limit: int) -> Rate:
        """One more request of the project."""
        now = self._now()
        window = int(now // WINDOW_S)
        with self._lock:
            if window != self._window:
                self._window = window
                self._counts.clear()
            self._counts[project_id] += 1
            used = self._counts[project_id]
        reset_s = max(1, round((window + 1) * WINDOW_S - now))
        return Rate(limit, max(0, limit - used), reset_s, exceeded=used > limit)
