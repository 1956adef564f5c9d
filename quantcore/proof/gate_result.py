"""The outcome of one quality gate. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quantcore.evaluation.quality import Number, Record

Status = Literal["pass", "warn", "fail", "skipped"]


class GateResult(Record):
    """One gate: the measured ``value``, the ``limit`` it is compared with, and a sentence for people."""

    gate: Annotated[str, Field(pattern=r"^G[0-9]+$")]
    name: str
    status: Status
    value: Number | None
    limit: Number | None
    detail: str
