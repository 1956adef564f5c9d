"""The levels of a verdict on a result, and what follows from some of them."""

from __future__ import annotations

from typing import Literal, get_args

Level = Literal["faithful", "good", "unclear", "degraded", "broken"]
"""From the best to the worst; ``unclear`` has too little text to tell (see ``quantcore.report.verdict``)."""
LEVELS: tuple[Level, ...] = get_args(Level)
POOR: tuple[Level, ...] = ("degraded", "broken")
"""Levels that call for a better recipe."""
UNPUBLISHED: tuple[Level, ...] = ("unclear", *POOR)
"""Levels of results that are only published if somebody insists."""
