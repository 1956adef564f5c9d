"""Turns unexpected errors into errors that name the phase of the work, so that users never see a traceback."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from quantcore.errors import DISK_FULL, QuantError, is_failure, reason_of
from quantcore.events import Emit, Event, PhaseStarted

TRACEBACK = "BITFOUNDRY_TRACEBACK"
"""Environment variable; if it is set, the traceback of an unexpected error goes to standard error as well."""


@contextmanager
def explained(emit: Emit) -> Iterator[Emit]:
    """Yield an ``emit`` that notes the phase of the work. Any other error inside becomes a QuantError."""
    phase = "start"

    def noting(event: Event) -> None:
        nonlocal phase
        if isinstance(event, PhaseStarted):
            phase = event.phase
        emit(event)

    try:
        yield noting
    except QuantError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        raise _as_quant_error(error, phase) from error


def _is_of_a_full_disk(error: BaseException) -> bool:
    """Return True also for a disk that can hold no more files: tempfile finds no folder then, and says so alone."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return True
    text = str(error)  # of safetensors, which has an error of its own, and of tempfile
    return f"os error {errno.ENOSPC}" in text or "No usable temporary directory" in text


def _as_quant_error(error: BaseException, phase: str) -> QuantError:
    if _is_of_a_full_disk(error):
        return QuantError(
            "The disk is full.",
            code="disk_full",
            hint="Free disk space where the result is written.",
            retryable=True,
        )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; torch may not be loaded
        return QuantError(
            f"Out of memory in the phase '{phase}': {reason_of(error)}",
            code="out_of_memory",
            hint="Use a machine or device with more memory. `bitfoundry plan` shows how much a job needs.",
            retryable=True,
        )
    kind, reason = type(error).__name__, reason_of(error)
    return QuantError(
        f"Unexpected error in the phase '{phase}': {reason if reason.startswith(kind) else f'{kind}: {reason}'}",
        code="unexpected_error",
        hint=f"This is a bug in Bitfoundry. Please report it with the traceback, which {TRACEBACK}=1 shows.",
        retryable=isinstance(error, OSError) and error.errno is not None,  # libraries raise OSError for bad files, too
    )
