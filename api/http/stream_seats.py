"""How many streams each project has open, in all processes of the API together.

Each stream has a seat in a sorted set in the broker, until a time that its process puts off while the stream lives:
what a killed process held is free a minute later. While the broker is away each process counts its own streams.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping

import redis

from api.http.rate_limit import connect_broker
from api.store.accounts.projects import QuotaExceeded

logger = logging.getLogger(__name__)

KEY = "bitfoundry:streams:"
LASTS_S = 60
RENEW_S = 15.0

# KEYS: the project's set; ARGV: the limit, how long a seat lasts, the seats. Returns what is used without them, -1 if
# they were taken. The broker's clock decides.
_TAKE = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local used = redis.call('ZCARD', KEYS[1])
if used >= tonumber(ARGV[1]) then return used end
for number = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[number]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return -1
"""
_COUNT = "return redis.call('ZCOUNT', KEYS[1], '(' .. redis.call('TIME')[1], '+inf')"
_NO_LIMIT = 1 << 53


class StreamSeats:
    """Safe to use from several threads."""

    def __init__(self, broker_url: str = "") -> None:
        self._broker = connect_broker(broker_url)

    def take(self, project_id: str, limit: int | None, num_here: int) -> str:
        """The seat of one more stream. ``num_here``: the project's streams of this process. Raises QuotaExceeded."""
        seat = secrets.token_hex(8)
        most = _NO_LIMIT if limit is None else limit
        used = self._ask(_TAKE, project_id, most, LASTS_S, seat)
        if used is None:
            used = num_here if num_here >= most else -1
        if used >= 0:
            raise QuotaExceeded("max_streams", most, used)
        return seat

    def renew(self, seats: Mapping[str, Collection[str]]) -> None:
        """The streams with these seats, by project, live. A broker that has forgotten them knows them again."""
        for project_id, taken in seats.items():
            if self._ask(_TAKE, project_id, _NO_LIMIT, LASTS_S, *taken) is None:
                return

    def leave(self, project_id: str, seat: str) -> None:
        try:
            if self._broker is not None:
                self._broker.zrem(KEY + project_id, seat)
        except redis.RedisError:
            pass  # it is free in a minute

    def count(self, project_id: str, num_here: int) -> int:
        """The project's open streams."""
        used = self._ask(_COUNT, project_id)
        return num_here if used is None else used

    def close(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def _ask(self, script: str, project_id: str, *arguments: object) -> int | None:
        """None while the broker is away."""
        if self._broker is None:
            return None
        try:
            return int(self._broker.eval(script, 1, KEY + project_id, *map(str, arguments)))
        except redis.RedisError as error:
            logger.warning("streams are counted by each process for itself: no broker (%s)", type(error).__name__)
            return None
