"""Number formats as data. What a format *is* needs no torch; see ``ints`` and ``floats`` for what computes with it."""

from __future__ import annotations

from quantcore.formats.floats import FLOATS, FloatFormat
from quantcore.formats.ints import INTS, IntFormat

Format = IntFormat | FloatFormat
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (*INTS, *FLOATS)}

__all__ = ["FORMATS", "FloatFormat", "Format", "IntFormat"]
