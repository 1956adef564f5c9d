"""The log of the in-memory API: lines such as ``[QUANTCORE-INFO]: ...`` on stderr.

It is an ordinary logger called ``quantcore``: users may change its level and its handlers.
"""

from __future__ import annotations

import logging
import sys


class _Terminal(logging.Handler):
    """Writes to the current stderr, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"[QUANTCORE-{record.levelname}]: {record.getMessage()}", file=sys.stderr)


log = logging.getLogger("quantcore")
log.addHandler(_Terminal())
log.setLevel(logging.INFO)
log.propagate = False
