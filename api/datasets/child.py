"""Runs the process that reads uploaded files: the API itself never parses a stranger's file.

``python -m quantcore examine`` has an environment of ours, without keys, reaches no other files of the service, and has
limits on memory and time. It ends with the process that waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from api import confinement
from api.http.errors import Problem
from api.readers import KEPT_VARIABLES
from api.settings import Settings
from quantcore.errors import CalibrationError, QuantError

TIMEOUT_S = 330.0  # the child's own limit of processor time comes first


async def examine(
    file: Path,
    action: str,
    settings: Settings,
    *,
    task: Mapping[str, Any] | None = None,
    own: Sequence[Path] = (),
    token: str | None = None,
    **options: str | int | None,
) -> dict[str, Any]:
    """Examine the file with ``quantcore.engine.data.examine`` in a child process. Take a turn first (``http.turns``).

    The child reaches the file, ``own`` files of the service, and the model of the ``task``, if any, as an engine does;
    ``token`` is for a model on the
    Hub. Raises QuantError for a fault in the file, Problem 422 ``unreadable_file`` if the reader did not survive it.
    """
    with tempfile.TemporaryDirectory(prefix="bitfoundry-reader-") as scratch:
        flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
        argv = [sys.executable, "-m", "quantcore", "examine", str(file), action, "--parent", str(os.getpid()), *flags]
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        with_hub = options.get("model_id") is not None
        if settings.confine_engine:
            reach = await run_in_threadpool(
                confinement.reach_of, settings, Path(scratch).resolve(), task or {}, with_hub=with_hub, own=[file, *own]
            )
            argv, environment = reach.command(argv), environment | reach.environment()
        output, status = await _run(argv, environment, f"{token or ''}\n")
    return _parse(output, status)


async def _run(argv: list[str], environment: Mapping[str, str], said: str) -> tuple[bytes, int]:
    """Return what the process prints, and its status. It hears ``said`` on its standard input."""
    reader = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await reader.communicate(said.encode())
    except TimeoutError as error:
        raise _unreadable("it took too long") from error
    finally:
        if reader.returncode is None:
            with suppress(ProcessLookupError):
                reader.kill()
            await reader.wait()
    return output, reader.returncode or 0


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
    fields = {"/calibration/column": "/column", "/model": "/model"}
    return CalibrationError(
        error["message"],
        code=error["code"],
        hint=error["hint"].replace("calibration.column", "`column`"),
        field=fields.get(error["field"], ""),
        allowed=error["allowed"],
        retryable=error["retryable"],
    )


def _unreadable(why: str) -> Problem:
    return Problem(
        422,
        "unreadable_file",
        f"The file cannot be read: {why}.",
        hint="It may need too much memory or time: use a smaller part of it.",
    )
