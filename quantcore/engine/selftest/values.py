"""The report of the self-test: frozen values, without torch. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quantcore.report.quality import Number, Record

SCHEMA_VERSION: Literal[1] = 1
Verdict = Literal["agreed", "differs", "failed"]


class Difference(Record):
    """How far two results are apart.

    ``largest`` is the largest difference of two numbers over the largest number, None without numbers; ``share`` that
    of the codes which differ, None without codes.
    """

    num_codes: int
    share: Number | None
    largest: Number | None


class Allowed(Record):
    """The upper bounds on a ``Difference``, and why they are not lower."""

    share: Number
    largest: Number
    why: str

    def covers(self, found: Difference) -> bool:
        """Return True if ``found`` is within the bounds; NaN is not."""
        return (found.share or 0) <= self.share and (found.largest is None or found.largest <= self.largest)


class Check(Record):
    """One computation on the device and its reference: on the CPU, or as ``beside`` says.

    ``first_s`` is the time of the first run on the device, which may compile kernels; ``device_s`` and ``beside_s``
    that of another one. ``error`` says why it failed; then there is no ``difference``.
    """

    group: str
    name: str
    verdict: Verdict
    allowed: Allowed
    beside: str
    difference: Difference | None = None
    first_s: Number | None = None
    device_s: Number | None = None
    beside_s: Number | None = None
    error: str | None = None


class Speed(Record):
    """How long a kind of work took, and how long a plan assumes that it takes; ``amount`` is in ``unit``."""

    name: str
    amount: Number
    unit: Literal["FLOP", "B"]
    seconds: Number
    planned_s: Number


class Selftest(Record):
    """The whole report. It names programs and hardware, but neither this machine nor its folders."""

    schema_version: Literal[1]
    agreed: bool
    device: Annotated[dict[str, str | int], Field(description="Type, name and memory in bytes.")]
    num_threads: int
    environment: Annotated[dict[str, str], Field(description="Versions of programs and of the system.")]
    seconds: Number
    checks: tuple[Check, ...]
    speeds: Annotated[
        tuple[Speed, ...], Field(description="Speed of the operations that determine how long a job takes.")
    ]
