"""An engine on nodes that a scheduler gives it, as a run sees it: the counterpart of ``worker.engine.Engine``.

All that the worker and the nodes tell each other lies in the folder ``work/<job>.<fence>.launch``: what to run, the
events, the log and the end of each node, and how much of them was read. So a worker that starts anew goes on where
another has stopped, while the engine computes. What the scheduler interrupts is submitted again, and the engine
continues after its last saved block.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from api.settings import Settings
from api.store.queue.leases import Failure, Lease
from worker.engine import Stop, engine_environment
from worker.launchers import LAUNCHERS, End, Launcher, LauncherAway, Request, Status
from worker.memory_watch import limit_of
from worker.on_node import LAUNCH, START, TASK, TOKEN, end_of, events_of, log_of
from worker.shared_files import STATE, Tail, write_whole
from worker.workspace import RESUME

READ_S = 1.0
"""Seconds between two looks at the files."""
OVERHEAD_BYTES = 256 << 20
"""Memory of ``worker.on_node`` beside its engine."""
MAX_LATE = 3
"""Looks until the file with a node's end must have appeared."""
LEFT_ALONE = (Stop.DRAINED, Stop.LEASE_LOST)
"""Stops of the worker and not of the job: the engine computes on, and the next worker goes on with it."""
NODE_SETTINGS = (
    "data_dir", "model_roots", "stop_grace_s", "secret_key_file", "lm_eval_tasks_dir", "memory_bytes", "memory_margin",
    "engine_threads", "engine_ranks", "confine_engine", "engine_command",
)  # fmt: skip

OUT_OF_TIME = Failure(
    "scheduler_time_limit",
    "The scheduler's time limit ended the job twice before it could save another block.",
    "Ask the operator for a longer time limit (the template of BITFOUNDRY_LAUNCHER_TEMPLATE), or use more nodes.",
    retryable=True,
    max_failures=1,
)
CANCELLED = Failure(
    "scheduler_cancelled",
    "Somebody cancelled the job in the scheduler, not here.",
    "Retry the job to continue after its last saved block.",
    retryable=True,
    max_failures=1,
)


@dataclass(frozen=True)
class Launch:
    """The files that start an engine elsewhere. ``said`` is what the nodes read (see ``worker.on_node``)."""

    folder: Path
    said: Mapping[str, Any]

    def write(self, task: Mapping[str, Any], token: str | None) -> None:
        """Write all files that the nodes need. Without the last, STATE, there is no launch."""
        self.folder.mkdir(mode=0o700)
        write_whole(self.folder / LAUNCH, json.dumps(self.said))
        write_whole(self.folder / TASK, json.dumps(task))
        if token is not None:
            write_whole(self.folder / TOKEN, token)
        write_whole(self.folder / STATE, json.dumps({"id": None, "read": {}, "progress": None, "num_starts": 0}))


def launch_of(
    settings: Settings, lease: Lease, folder: Path, attempt_dir: Path, *, with_hub: bool, traceparent: str | None
) -> Launch:
    """Return the launch of an attempt in ``attempt_dir``. The nodes get no secret but the job's own Hub token."""
    kept = settings.model_dump(mode="json", include=set(NODE_SETTINGS))
    urls = {name: getattr(settings, name).get_secret_value() for name in ("database_url", "broker_url")}
    said = {
        "name": f"bitfoundry-{lease.job_id}",
        "settings": kept | {name: _without_secrets(url) for name, url in urls.items()},  # engines may not use the ports
        "attempt_dir": str(attempt_dir),
        "nodes": lease.nodes,
        "with_hub": with_hub,
        "traceparent": traceparent,
        "planned_bytes": lease.needs_memory_bytes,
        "project_id": lease.project_id,
    }
    return Launch(folder, said)


class Allocation:
    """An engine that runs, or waits to run, on a scheduler's nodes. ``stop`` may be called from any thread."""

    def __init__(
        self, settings: Settings, launcher: Launcher, launch: Launch, on_status: Callable[[Status, str], None]
    ):
        """Go on with what lies in the launch's folder. ``on_status`` hears of each new status and id."""
        self.stopped_by: Stop | None = None
        self.failure: Failure | None = None
        self._settings = settings
        self._launcher = launcher
        self._launch = launch
        self._num_nodes: int = launch.said["nodes"]
        self._on_status = on_status
        state = json.loads((launch.folder / STATE).read_text())
        self._id: str | None = state["id"]
        self._progress: str | None = state["progress"]
        self._num_starts: int = state["num_starts"]
        self._read = state["read"]
        self._written = ""
        self._events = self._tails(events_of)
        self._logs = [*self._tails(log_of), self._tail(f"{launcher.name}.log")]
        self._exit_status = 0
        self._is_running = False
        self._is_cancelled = False
        self._is_concluded = False
        self._num_late = 0
        self._wake = threading.Event()
        self._ended = threading.Event()

    @property
    def is_left_alone(self) -> bool:
        """True if the engine computes on without this worker."""
        return self.stopped_by in LEFT_ALONE

    def stop(self, reason: Stop) -> None:
        """End the engine, or leave it alone if only this worker ends. Returns at once."""
        if self.stopped_by is None or reason is Stop.LEASE_LOST:
            self.stopped_by = reason
        self._wake.set()

    kill = stop

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the engine's events until it has ended or is left alone. Asks for the allocation first."""
        shown: Status | None = None
        try:
            while not self.is_left_alone:
                status = self._look()
                for tail in self._events:
                    for line in tail.lines():
                        yield json.loads(line)
                self._write_state()
                if status != shown and not self.is_left_alone:
                    self._on_status(status, self._id or "")
                    shown = status
                if status.end is not None and self._conclude(status):
                    self._is_concluded = True
                    return
                self._wake.wait(self._settings.launcher_poll_s)
                self._wake.clear()
        finally:
            self._ended.set()

    def log_lines(self) -> Iterator[bytes]:
        """Yield the lines of all nodes' logs, and of the scheduler's, until the end of ``lines``."""
        is_last = False
        while True:
            for tail in self._logs:
                prefix = f"{tail.path.name.replace('log.', 'node ')}: ".encode() if len(self._logs) > 2 else b""
                for line in tail.lines():
                    yield prefix + line
            if is_last:
                return
            is_last = self._ended.wait(READ_S)

    def wait(self) -> int:
        """Return the engine's exit status. If nobody reads ``lines`` to their end, the engine is ended first."""
        while not self._is_concluded and not self.is_left_alone:
            for _ in self.lines():
                pass
        self._write_state()
        return self._exit_status

    def _look(self) -> Status:
        """Return the allocation's status, after a submission or a cancel where one is due."""
        try:
            if self._id is None:
                if self.stopped_by is not None:
                    return Status("CANCELLED", end=End.CANCELLED)
                self._num_starts += 1
                self._id = self._find() or self._launcher.submit(self._request())
                self._write_state()
            if self.stopped_by is not None and not self._is_cancelled:
                self._launcher.cancel(self._id)
                self._is_cancelled = True
            status = self._launcher.status(self._id)
        except LauncherAway as error:
            return Status("AWAY", is_running=self._is_running, reason=str(error))
        self._is_running = status.is_running
        return status

    def _find(self) -> str | None:
        """Return the allocation of this launch whose id nobody wrote down. Cancels those of earlier launches."""
        found = self._launcher.find(self._launch.said["name"])
        mine = _of_folder(found, self._launch.folder)
        for number in found.keys() - mine[:1]:
            self._launcher.cancel(number)
        return mine[0] if mine else None

    def _request(self) -> Request:
        said = self._launch.said
        environment = engine_environment(self._settings, with_hub=said["with_hub"]) | {START: str(self._num_starts)}
        return _request(self._settings, said, self._launch.folder, environment)

    def _conclude(self, status: Status) -> bool:
        """Find out what the end of an allocation means. Returns False if another one follows it."""
        ends = {rank: end for rank in range(self._num_nodes) if (end := self._end_of(rank)) is not None}
        first = ends.get(0)
        self._exit_status = first["status"] if first else 1
        if self._exit_status == 0 or self.stopped_by is not None:
            return True
        if status.end is End.CANCELLED:
            self.failure = CANCELLED
        elif status.end is End.OUT_OF_MEMORY:
            self.failure = self._out_of_memory()
        elif status.end is End.EXITED or (status.end is End.FORGOTTEN and first is not None):
            if first is None and self._num_late < MAX_LATE:  # a network disk may show a file late
                self._num_late += 1
                return False
            told = next((end["failure"] for end in ends.values() if end["failure"]), None)
            self.failure = Failure(**told) if told else None if first else self._never_began()
        elif status.end is End.INTERRUPTED or self._has_progress():
            for rank in ends:
                (self._launch.folder / end_of(rank)).unlink(missing_ok=True)  # how the next start ends, it says itself
            self._id, self._num_late = None, 0
            self._write_state()
            return False
        else:
            self.failure = OUT_OF_TIME
        return True

    def _has_progress(self) -> bool:
        """Return whether the engine has saved anything since it was submitted last."""
        folder = Path(self._launch.said["attempt_dir"], RESUME)
        saved = (
            []
            if folder.is_symlink()
            else sorted(  # engines may make links to anywhere
                (name, os.lstat(Path(place, name)).st_size) for place, _, names in os.walk(folder) for name in names
            )
        )
        before, self._progress = self._progress, hashlib.sha256(repr(saved).encode()).hexdigest()
        return self._progress != before

    def _out_of_memory(self) -> Failure:
        asked = self._request().memory_bytes >> 20
        return Failure(
            "memory_limit",
            f"The scheduler ended the job because it used more memory than the {asked} MiB that were asked for.",
            "Use fewer or shorter windows, or smaller images. If the model and data are trusted, the operator can raise"
            " the limit (BITFOUNDRY_MEMORY_MARGIN).",
        )

    def _never_began(self) -> Failure:
        """Return the failure of an allocation in which no engine ended: mostly a fault of the template."""
        log = self._launch.folder / f"{self._launcher.name}.log"
        said = log.read_text(errors="replace").strip()[-1000:] if log.exists() else ""
        return Failure(
            "launch_failed",
            f"The scheduler ran the job's script, but no engine came to its end. Its output ends: {said or '(none)'}",
            "The operator can check the template (BITFOUNDRY_LAUNCHER_TEMPLATE) and that all nodes see the folder of"
            " BITFOUNDRY_DATA_DIR and Python under the same paths.",
            retryable=True,
            max_failures=2,
        )

    def _end_of(self, rank: int) -> dict[str, Any] | None:
        file = self._launch.folder / end_of(rank)
        end: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return end

    def _tails(self, name_of: Callable[[int], str]) -> list[Tail]:
        return [self._tail(name_of(rank)) for rank in range(self._num_nodes)]

    def _tail(self, name: str) -> Tail:
        return Tail(self._launch.folder / name, self._read.get(name, 0))

    def _write_state(self) -> None:
        read = {tail.path.name: tail.position for tail in (*self._events, *self._logs)}
        state = {"id": self._id, "read": read, "progress": self._progress, "num_starts": self._num_starts}
        if (text := json.dumps(state)) != self._written:
            write_whole(self._launch.folder / STATE, text)
            self._written = text


def end(launcher: Launcher, folder: Path) -> bool:
    """Cancel the allocation of a launch that nobody follows. Returns True if it has ended. Raises LauncherAway."""
    try:
        found = [json.loads((folder / STATE).read_text())["id"]]
        if found == [None]:
            found = _of_folder(launcher.find(json.loads((folder / LAUNCH).read_text())["name"]), folder)
    except FileNotFoundError:
        return True  # it was never begun, or its run is tidying up at this moment
    for number in found:
        launcher.cancel(number)
    return all(launcher.status(number).end is not None for number in found)


def preview(name: str, *, nodes: int, planned_bytes: int | None) -> str:
    """Return what a launcher would ask its scheduler for, with the settings in the environment.

    Raises ConfigError ``unknown_launcher`` and ``invalid_settings``.
    """
    launcher = LAUNCHERS.get(name)
    known = {"database_url": "postgresql://", "broker_url": "redis://", "launcher": name}
    settings = Settings(**known, data_dir=Path(os.environ.get("BITFOUNDRY_DATA_DIR", "/DATA_DIR")))  # type: ignore[arg-type]
    said = {"name": "bitfoundry-JOB", "nodes": nodes, "planned_bytes": planned_bytes}
    return launcher.preview(settings, _request(settings, said, settings.work_dir / "JOB.launch", {}))


def _of_folder(found: Mapping[str, Path], folder: Path) -> list[str]:
    """Return the ids of those of the ``found`` allocations that are of the launch in ``folder``."""
    return [number for number, where in found.items() if where == folder]


def _request(settings: Settings, said: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Request:
    return Request(
        name=said["name"],
        folder=folder,
        argv=(sys.executable, "-m", "worker.on_node", str(folder)),
        nodes=said["nodes"],
        memory_bytes=limit_of(settings, said["planned_bytes"]) + OVERHEAD_BYTES,
        cpus=settings.engine_threads,
        environment=environment,
    )


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
