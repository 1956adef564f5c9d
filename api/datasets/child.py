"""Runs the process that reads uploaded files: the API itself never parses a stranger's file.

``python -m quantcore examine`` has an environment of ours, without keys and addresses, and limits on memory and time.
It ends with the process that waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from api.http.errors import Problem
from quantcore.errors import CalibrationError, QuantError

TIMEOUT_S = 330.0  # the child's own limit of processor time comes first
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME")


async def examine(file: Path, action: str, **options: str | int | None) -> dict[str, Any]:
    """Examine the file with ``quantcore.data.examine`` in a child process. Take a turn first (``http.turns``).

    Raises CalibrationError for a fault in the file, Problem 422 ``unreadable_file`` if the reader did not survive it.
    """
    flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quantcore", "examine", str(file), action, "--parent", str(os.getpid()), *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await reader.communicate()
    except TimeoutError as error:
        raise _unreadable("it took too long") from error
    finally:
        if reader.returncode is None:
            with suppress(ProcessLookupError):
                reader.kill()
            await reader.wait()
    return _parse(output, reader.returncode or 0)


def _parse(output: bytes, status: int) -> dict[str, Any]:
    if status == -signal.SIGXCPU:
        raise _unreadable("it took too long")
    try:
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise _unreadable(f"its reader ended with status {status}") from error
    if "error" in answer:
        raise _calibration_error(answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def _calibration_error(error: dict[str, Any]) -> QuantError:
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
