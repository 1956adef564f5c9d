"""The log of the in-memory API writes lines such as ``[QUANTCORE-INFO]: ...`` on stderr.

It is an ordinary logger called ``quantcore``: its level and its handlers are the user's to change.
"""

from __future__ import annotations

import logging
import sys


class _Terminal(logging.Handler):
    """Writes to the stderr of that moment, which notebooks and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"[QUANTCORE-{record.levelname}]: {record.getMessage()}", file=sys.stderr)


log = logging.getLogger("quantcore")
log.addHandler(_Terminal())
log.setLevel(logging.INFO)
log.propagate = False
