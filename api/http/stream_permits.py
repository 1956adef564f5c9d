"""A semaphore for each project's open streams, shared by all processes of the API.

Each stream holds a permit in a sorted set in the broker. Its process extends the permit while the stream lives, so the
permits of a killed process expire within a minute. While the broker is away each process counts its own streams.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping

import redis

from api.store import broker
from api.store.accounts.projects import QuotaExceeded
from quantcore.config.time_limits import BROKER_COUNT_S

logger = logging.getLogger(__name__)

KEY = "bitfoundry:streams:"
EXPIRES_S = 60
RENEW_S = 15.0

# KEYS: the project's set; ARGV: the limit, seconds until permits expire, the permits. Returns -1 if they were acquired,
# else the number in use. The broker's clock decides. What is not ours, of another type or too long valid, is deleted.
_ACQUIRE = """
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[2], '+inf')
local used = redis.call('ZCARD', KEYS[1])
if used >= tonumber(ARGV[1]) then return used end
for number = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[number]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return -1
"""
_COUNT = "return redis.call('ZCOUNT', KEYS[1], '(' .. redis.call('TIME')[1], '+inf')"
_NO_LIMIT = 1 << 53


class StreamPermits:
    """The semaphore of every project. Safe to use from several threads."""

    def __init__(self, broker_url: str = "") -> None:
        self._broker = broker.connect(broker_url, BROKER_COUNT_S)

    def acquire(self, project_id: str, limit: int | None, num_here: int) -> str:
        """Return the permit for a new stream. ``num_here``: the project's streams in this process.

        Raises QuotaExceeded.
        """
        permit = secrets.token_hex(8)
        limit = _NO_LIMIT if limit is None else limit
        used = self._eval(_ACQUIRE, project_id, limit, EXPIRES_S, permit)
        if used is None:
            used = num_here if num_here >= limit else -1
        if used >= 0:
            raise QuotaExceeded("max_streams", limit, used)
        return permit

    def renew(self, permits: Mapping[str, Collection[str]]) -> None:
        """Extend the ``permits`` of each project. A broker that lost them gets them back."""
        for project_id, held in permits.items():
            if self._eval(_ACQUIRE, project_id, _NO_LIMIT, EXPIRES_S, *held) is None:
                return

    def release(self, project_id: str, permit: str) -> None:
        """Give a permit back. Without a broker it expires."""
        try:
            if self._broker is not None:
                self._broker.zrem(KEY + project_id, permit)
        except redis.RedisError:
            pass

    def count(self, project_id: str, num_here: int) -> int:
        """Return the number of the project's open streams."""
        used = self._eval(_COUNT, project_id)
        return num_here if used is None else used

    def close(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def _eval(self, script: str, project_id: str, *arguments: object) -> int | None:
        """Return the script's number, None while the broker is away."""
        if self._broker is None:
            return None
        try:
            return int(self._broker.eval(script, 1, KEY + project_id, *map(str, arguments)))
        except redis.RedisError as error:
            logger.warning("streams are counted by each process for itself: no broker (%s)", type(error).__name__)
            return None
