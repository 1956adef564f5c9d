"""Runs a program that came with a model in a process that the kernel ends: no C code can keep it waiting. No torch.

A chat template is a program. Jinja's sandbox keeps it from files, and a signal would stop its loops, but not one long
operation such as a power of large numbers, which may already happen when it is compiled.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 30.0


class TookTooLong(Exception):
    """The function was ended by the limit of time."""


class LimitedProcess:
    """A fork of this process that calls ``function``, which returns text, for as long as this object lives.

    It starts at the first call. A call may take ``max_seconds``, and the process ``max_memory_bytes`` more than this
    one has.
    """

    def __init__(self, function: Callable[..., str], *, max_seconds: float, max_memory_bytes: int) -> None:
        self._function = function
        self._limits = max_seconds, max_memory_bytes
        self._end: weakref.finalize[Any, Any] | None = None
        self._pid = 0
        self._connection: socket.socket | None = None

    def __call__(self, *arguments: Any) -> str:
        """Return what the function returns. Raises TookTooLong, MemoryError, or RuntimeError with its error."""
        if self._connection is None:
            self._connection = self._start()
        try:
            _send(self._connection, pickle.dumps(arguments))
            is_result, answer = json.loads(_receive(self._connection))
        except (EOFError, OSError) as error:
            status = self._stop()
            if status == -signal.SIGALRM or isinstance(error, TimeoutError):
                raise TookTooLong(f"it took more than {self._limits[0]:g} s") from None
            raise MemoryError(f"it ended its process (status {status})") from None
        if is_result:
            return str(answer)
        raise RuntimeError(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        max_seconds, max_memory_bytes = self._limits
        most = _size_bytes() + max_memory_bytes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: only this function runs in the fork
            self._pid = os.fork()
        if self._pid == 0:
            with suppress(BaseException):
                ours.close()
                _serve(theirs, self._function, max_seconds, most)
            os._exit(0)
        theirs.close()
        ours.settimeout(2 * max_seconds + GRACE_S)  # the kernel ends the process before
        self._end = weakref.finalize(self, _finish, ours, self._pid)
        return ours

    def _stop(self) -> int:
        """End the process, and return its exit status: the negative number of a signal."""
        assert self._end is not None
        self._connection = None
        status = self._end()
        assert isinstance(status, int)
        return status


def _finish(connection: socket.socket, pid: int) -> int:
    """End the process and return its status. Later forks may hold its connection as well: it would see no end."""
    connection.close()
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _serve(connection: socket.socket, function: Callable[..., str], max_seconds: float, most_bytes: int) -> None:
    gc.disable()  # it would copy every page of what this process shares with the other one
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    import resource  # a process is forked on POSIX systems alone; this module is loaded anywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    finite = [limit for limit in (soft, hard, most_bytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(finite), hard))
    while True:
        arguments = pickle.loads(_receive(connection))
        signal.setitimer(signal.ITIMER_REAL, max_seconds)  # unhandled, so that the kernel acts on it
        try:
            answer = True, function(*arguments)
        except MemoryError:
            os._exit(1)
        except BaseException as error:
            answer = False, f"{type(error).__name__}: {str(error)[:200]}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, json.dumps(answer).encode())


def _size_bytes() -> int:
    """Return the size of this process's address space; where the system does not say, as much as there is."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 1 << 62


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "little") + data)


def _receive(connection: socket.socket) -> bytes:
    """Return the next message. Raises EOFError when the other end is closed."""
    return _read(connection, int.from_bytes(_read(connection, 8), "little"))


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = connection.recv(min(count - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
