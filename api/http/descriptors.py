"""Sees to it that the process may open as many files and connections as it serves (``ulimit -n``)."""

from __future__ import annotations

import logging
import resource

from api.http.connection_limits import MAX_CONNECTIONS

logger = logging.getLogger(__name__)

NEEDED = MAX_CONNECTIONS + 200
"""Connections of clients, and our own files, connections to the database and pipes."""


def check() -> None:
    """Raise the limit as far as this account may; children inherit it. Warn if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_enough(soft):
        return
    soft = hard if not _is_enough(hard) else NEEDED
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not _is_enough(soft):
        logger.warning(
            "this process may open %d files (ulimit -n), but needs %d for %d connections: otherwise, clients are "
            "rejected. Raise the limit, e.g. LimitNOFILE of systemd, or nofile of the container.",
            soft,
            NEEDED,
            MAX_CONNECTIONS,
        )


def _is_enough(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= NEEDED
