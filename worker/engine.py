"""The engine as a child process, with JSON lines on stdout and a log on stderr.

It has its own session and group, and a clean environment.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from api import confinement
from api.settings import Settings
from api.store.queue.leases import Failure
from quantcore.errors import QuantError
from worker.memory_watch import MemoryLimit, MemoryWatch
from worker.pace import Pace
from worker.torchrun import Node, engine_argv

PARENT_WATCH = Path(__file__).with_name("parent_watch.py")
MAX_LINE_BYTES = 4 << 20
EVENT = b'{"kind"'
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

# The engine reads models that strangers made: it gets what it needs to compute, but no address, key or token.
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "HF_HOME",
)
# Only an engine that fetches its model or its text from the Hub also gets these; the token comes by its
# standard input.
HUB_VARIABLES = (
    "HF_ENDPOINT",
    "HF_HUB_CACHE",
    "HF_HUB_DISABLE_XET",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
)
NETWORK_PREFIXES = ("NCCL_", "RCCL_", "GLOO_")  # the network between the processes of several nodes
KEPT_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "PYTORCH_", *NETWORK_PREFIXES)


class Running(Protocol):
    """What ``StopSwitch`` ends: a child process, or an engine on other nodes."""

    def stop(self, reason: Stop) -> None: ...

    def kill(self, reason: Stop) -> None: ...

    def wait(self) -> int: ...


AnyRunning = TypeVar("AnyRunning", bound=Running)


class EventLost(QuantError):
    """An event of the engine cannot be read: whoever waits for it would wait for ever."""

    def __init__(self, line: bytes) -> None:
        kind = line[:80].decode("ascii", "replace")
        super().__init__(
            f"The engine sent an unreadable event, or one of more than {MAX_LINE_BYTES >> 20} MiB: {kind}...",
            code="engine_event_lost",
            hint="This is a bug in Bitfoundry. Please report it with the job's log.",
        )


class Stop(Enum):
    """The reasons why the supervisor ends an engine."""

    CANCELLED = "cancelled"
    PAUSED = "paused"
    TIME_IS_UP = "time_is_up"
    NODE_LOST = "node_lost"
    DRAINED = "drained"
    LEASE_LOST = "lease_lost"
    NO_ROOM = "no_room"
    NO_MEMORY = "no_memory"
    WORKER_NEEDED = "worker_needed"
    IDLE = "idle"


class Child:
    """A running child process. ``stop`` may be called from any thread; only the first reason counts."""

    def __init__(
        self,
        settings: Settings,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        said: str | None = None,
        listens: bool = False,
        limit: MemoryLimit,
    ) -> None:
        """Start the process, from a thread that outlives it: the kernel ties the child to that thread.

        ``said`` is written to its standard input, which stays open for ``tell`` if the child ``listens``.
        ``limit`` is that of its memory.
        """
        self.stopped_by: Stop | None = None
        self.is_left_alone = False  # it ends with this worker; an ``Allocation`` may not
        self.limit = limit
        self._grace_s = settings.stop_grace_s
        self._lock = threading.Lock()
        self._ended = False
        self._kill_timer: threading.Timer | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PARENT_WATCH), str(os.getpid()), *limit.for_parent_watch(), *argv],
            stdin=subprocess.PIPE if said is not None or listens else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        if said is not None:
            self.tell(said)
        if self._process.stdin is not None and not listens:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._end = threading.Thread(target=self._await_end, name="engine-end", daemon=True)
        self._end.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def failure(self) -> Failure | None:
        """The reason for its end that the process itself could not report."""
        return self.limit.failure() if self.limit.is_exceeded else None

    def tell(self, text: str) -> None:
        """Write to the standard input of a child that ``listens``. One that has ended hears nothing."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the events that the engine prints, until it ends, at the pace of ``Pace``. Skips other output.

        Meanwhile the process is ended if it exceeds the limit of its memory. Raises EventLost for an event that cannot
        be read: none is dropped in silence.
        """
        assert self._process.stdout is not None
        watch = MemoryWatch(self.pid, self.limit, lambda: self.kill(Stop.NO_MEMORY))
        with watch, self._process.stdout as stream:
            pace, is_rest = Pace(), False  # of a line that was too long
            while line := stream.readline(MAX_LINE_BYTES):
                pace.keep(line)
                if not is_rest and (event := _parse(line)):
                    yield event
                is_rest = not line.endswith(b"\n")

    def log_lines(self) -> Iterator[bytes]:
        """Yield the lines of stderr until the engine ends, at the pace of ``Pace``.

        A caller must read them, or the engine blocks.
        """
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            pace = Pace()
            while line := stream.readline(MAX_LINE_BYTES):
                pace.keep(line)
                yield line

    def wait(self) -> int:
        """Wait for the end and return the exit status; 128 + n if signal n ended the engine."""
        self._end.join()  # only then may the process be reaped
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        status = self._process.wait()
        self.limit.close(self.pid)
        return status if status >= 0 else 128 - status

    def stop(self, reason: Stop) -> None:
        """Ask the whole group to end, and kill it after the grace time. Returns at once."""
        with self._lock:
            if self.stopped_by is None and not self._ended:
                self.stopped_by = reason
                self._signal_group(signal.SIGTERM)
                self._kill_timer = threading.Timer(self._grace_s, self.kill, [reason])
                self._kill_timer.daemon = True
                self._kill_timer.start()

    def kill(self, reason: Stop) -> None:
        """End the whole group now."""
        with self._lock:
            if not self._ended:
                if reason is Stop.LEASE_LOST or self.stopped_by is None:
                    self.stopped_by = reason
                self._signal_group(signal.SIGKILL)

    def _await_end(self) -> None:
        """Kill everything that the engine started once it ends: nothing may hold the GPU, or our end of the pipe."""
        with suppress(ChildProcessError):  # it has been reaped already: the processes that it started must end anyway
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its group id is still its own
        with self._lock:
            self._ended = True
            self._signal_group(signal.SIGKILL)
            if self._kill_timer:
                self._kill_timer.cancel()

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class StopSwitch:
    """Stops the one child of an attempt; a child that starts after the stop ends at once.

    Its methods may be called from any thread. ``reason`` is that of the first stop; a lost lease replaces it.
    """

    def __init__(self) -> None:
        self.reason: Stop | None = None
        self.child: Running | None = None
        self._lock = threading.Lock()

    def start(self, start: Callable[[], AnyRunning]) -> AnyRunning:
        """Start the child with the function ``start``, and return it."""
        with self._lock:
            self.child = child = start()
            self._apply()
            return child

    def stop(self, reason: Stop) -> None:
        """End the child: with a grace time, or at once when the lease is lost."""
        with self._lock:
            if self.reason is None or reason is Stop.LEASE_LOST:
                self.reason = reason
            self._apply()

    def _apply(self) -> None:
        if self.child is not None and self.reason is not None:
            end = self.child.kill if self.reason is Stop.LEASE_LOST else self.child.stop
            end(self.reason)


@dataclass(frozen=True)
class HubAccess:
    """Access of an engine to the Hub, with a token or as anybody."""

    token: str | None = field(default=None, repr=False)


class Engine(Child):
    """An engine process that works on a task."""

    def __init__(
        self,
        settings: Settings,
        task_file: Path,
        *,
        hub: HubAccess | None = None,
        traceparent: str | None = None,
        node: Node | None = None,
        limit: MemoryLimit,
        project_id: str,
    ) -> None:
        """Start the engine of a job of the project (see ``Child``).

        The token of ``hub`` becomes the first line of its standard input, so that no environment and no file holds it.
        ``traceparent`` is the parent span of its own spans. ``node`` is its place among several nodes.
        """
        argv = [*engine_argv(settings, node), str(task_file)]
        originals = confinement.originals_of(project_id)
        environment = engine_environment(settings, with_hub=hub is not None)
        environment[confinement.ORIGINALS] = "" if originals is None else str(originals)
        if settings.confine_engine:
            task = json.loads(task_file.read_text())
            num_processes = settings.engine_ranks * (1 if node is None else node.count)
            reach = confinement.reach_of(
                settings,
                task_file.parent,
                task,
                with_hub=hub is not None,
                num_processes=num_processes,
                originals=originals,
            )
            argv, environment = reach.command(argv), environment | reach.environment()
        super().__init__(
            settings,
            argv,
            environment | ({"TRACEPARENT": traceparent} if traceparent else {}),
            said=None if hub is None or hub.token is None else f"{hub.token}\n",
            limit=limit,
        )


def engine_environment(settings: Settings, *, with_hub: bool = False) -> dict[str, str]:
    """Return an engine's environment: the allowed variables, and the number of threads for each of its processes.

    The threads of all processes add up to those of the settings.
    """
    names = KEPT_VARIABLES + HUB_VARIABLES if with_hub else KEPT_VARIABLES
    kept = {name: value for name, value in os.environ.items() if name in names or name.startswith(KEPT_PREFIXES)}
    threads = str(max(1, settings.engine_threads // settings.engine_ranks))
    # The Hub's library would log signed addresses of files when a download stumbles.
    quiet = {"HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # Waiting threads give their core away: a job takes half the time beside other work on the machine, and 7 %
    # more alone.
    counts = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    return kept | quiet | counts | {"PYTHONUNBUFFERED": "1"}


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line; None for other output, and for the beginning of an event that the engine's end cut.

    What Postgres accepts in no JSON is replaced. Raises EventLost.
    """
    try:
        event = _storable(json.loads(line))
    except (ValueError, RecursionError) as error:
        if line.startswith(EVENT) and (line.endswith(b"\n") or len(line) == MAX_LINE_BYTES):
            raise EventLost(line) from error
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def _storable(value: Any) -> Any:
    """Return ``value`` with NUL and half surrogate pairs replaced in all texts, and None for NaN and infinity."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_storable(name): _storable(member) for name, member in value.items()}
    return [_storable(member) for member in value] if isinstance(value, list) else value
