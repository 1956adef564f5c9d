"""Number formats as data. What a format *is* needs no torch; what computes with it imports torch when called.

Every format: ``encode(x) -> codes``, ``decode(codes) -> float32``, and ``round`` / ``round_`` for what the two give one
after the other. x holds scaled values in float32, any shape. On the CPU all are fastest on pieces that fit the cache.
"""

from __future__ import annotations

from quantcore.formats.codebooks import CODEBOOKS, CodebookFormat
from quantcore.formats.floats import FLOATS, FloatFormat
from quantcore.formats.ints import INTS, IntFormat

Format = IntFormat | FloatFormat | CodebookFormat
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (*INTS, *FLOATS, *CODEBOOKS)}

__all__ = ["FORMATS", "CodebookFormat", "FloatFormat", "Format", "IntFormat"]
