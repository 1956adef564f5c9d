"""Ids: a prefix and 32 hex digits laid out as a UUID version 7 (RFC 9562), so that ids sort by age."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """Return ``job_`` + 48 bits of milliseconds, the version, the variant and 74 random bits, as lower-case hex."""
    milliseconds = time.time_ns() // 1_000_000
    value = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    return f"{prefix}_{value:032x}"
