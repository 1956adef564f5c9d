"""The process that reads uploaded files: the API itself never parses what a stranger sent.

``python -m quantcore examine`` with an environment of ours, without keys and addresses, and limits on memory and time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from api.errors import Problem
from quantcore.errors import CalibrationError, QuantError

TIMEOUT_S = 330.0  # the child's own limit of processor time comes first
WAIT_S = 20.0
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME")

_slots = threading.BoundedSemaphore(2)  # more at once would be slower, not faster, and take the memory of the jobs


def examine(file: Path, action: str, **options: str | int | None) -> dict[str, Any]:
    """What ``quantcore.calibration.examine`` says of the file. Raises CalibrationError with what it found wrong,
    Problem 422 ``unreadable_file`` for a file that its reader did not survive, 503 ``busy``."""
    flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    if not _slots.acquire(timeout=WAIT_S):
        raise Problem(503, "busy", "Too many files are being read.", hint="Try again.", headers={"Retry-After": "5"})
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "quantcore", "examine", str(file), action, *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise _unreadable("it took too long") from error
    finally:
        _slots.release()
    try:
        said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise _unreadable(f"its reader ended with status {ended.returncode}") from error
    if "error" in said:
        raise _found(said["error"])
    result: dict[str, Any] = said["result"]
    return result


def _found(error: dict[str, Any]) -> QuantError:
    column = error["field"] == "/calibration/column"
    return CalibrationError(
        error["message"],
        code=error["code"],
        hint=error["hint"].replace("calibration.column", "`column`"),
        field="/column" if column else "",
        allowed=error["allowed"],
    )


def _unreadable(why: str) -> Problem:
    return Problem(
        422,
        "unreadable_file",
        f"The file cannot be read: {why}.",
        hint="It may need too much memory or time: give a smaller part of it.",
    )
