"""Runs an engine on a node of an allocation, and writes what it reports to files that the worker reads.

    python -m worker.on_node FOLDER

``FOLDER`` is what ``worker.allocation`` prepared. No engine can write there: each is confined to its attempt's folder.
This process has no address and no key of the service. When the scheduler starts an allocation again (after a
preemption, or on another node), the engine continues after its last saved block.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from api.settings import Settings
from quantcore.errors import QuantError
from worker.engine import Engine, EventLost, HubAccess, Stop
from worker.memory_watch import MemoryLimit
from worker.nodes import find_free_port
from worker.shared_files import write_whole
from worker.torchrun import Node

LAUNCH = "launch.json"
TASK = "task.json"
TOKEN = "token"
LOOK_S = 0.5
MEET_S = 300
START = "BITFOUNDRY_START"
"""Variable with the number of the submission."""
RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables with the number of a node, as schedulers set them."""


def main() -> int:
    folder = Path(sys.argv[1])
    launch: dict[str, Any] = json.loads((folder / LAUNCH).read_text())
    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    end_file = folder / end_of(rank)
    if end_file.exists() and json.loads(end_file.read_text())["status"] == 0:
        return 0  # the node was lost after its work was done
    end_file.unlink(missing_ok=True)
    status, failure = _run(launch, folder, rank)
    write_whole(end_file, json.dumps({"status": status, "failure": failure}))
    return status


def events_of(rank: int) -> str:
    return f"events.{rank}.jsonl"


def log_of(rank: int) -> str:
    return f"log.{rank}"


def end_of(rank: int) -> str:
    return f"end.{rank}.json"


def _run(launch: dict[str, Any], folder: Path, rank: int) -> tuple[int, dict[str, Any] | None]:
    """Run the engine to its end. Returns its exit status, and the failure that it could not report itself."""
    settings = Settings(**launch["settings"])
    attempt = Path(launch["attempt_dir"])
    if rank == 0:
        _prepare(folder, attempt)
    with (folder / events_of(rank)).open("ab", buffering=0) as events, (folder / log_of(rank)).open("ab", 0) as log:
        try:
            engine = Engine(
                settings,
                attempt / TASK,
                hub=HubAccess(_token(folder)) if launch["with_hub"] else None,
                traceparent=launch["traceparent"],
                node=_meet(folder, rank, launch["nodes"]),
                limit=MemoryLimit(settings, launch["planned_bytes"], f"{launch['name']}.{rank}"),
                project_id=launch["project_id"],
            )
            signal.signal(signal.SIGTERM, lambda *_: engine.stop(Stop.DRAINED))
            copy = threading.Thread(target=_copy_log, args=(engine, log), name="log", daemon=True)
            copy.start()
            try:
                for line in engine.lines():
                    events.write(json.dumps(line).encode() + b"\n")
            except EventLost:
                engine.kill(Stop.LEASE_LOST)
                raise
            status = engine.wait()
            copy.join()
            failure = engine.failure
        except QuantError as error:
            return 1, {"code": error.code, "message": error.message, "hint": error.hint}
    return status, None if failure is None else asdict(failure)


def _prepare(folder: Path, attempt: Path) -> None:
    """Lay out the attempt's folder for a start: an engine that began here before may have changed all in it."""
    for path in attempt.glob("output*"):
        shutil.rmtree(path, ignore_errors=True)
    write_whole(attempt / TASK, (folder / TASK).read_text())


def _token(folder: Path) -> str | None:
    file = folder / TOKEN
    return file.read_text() if file.exists() else None


def _meet(folder: Path, rank: int, count: int) -> Node | None:
    """Find out where the first process of node 0 listens; None if there are no others.

    Node 0 says so in a file of this start. Raises QuantError ``nodes_missing``.
    """
    if count == 1:
        return None
    run = ".".join(os.environ.get(name, "0") for name in (START, "SLURM_RESTART_COUNT"))
    file = folder / f"meet.{run}.json"
    if rank == 0:
        address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostbyname(socket.gethostname())
        write_whole(file, json.dumps({"host": address, "port": find_free_port(address)}))
    deadline = time.monotonic() + MEET_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise QuantError(
                "The first node of this job did not say where the others find it.",
                code="nodes_missing",
                hint="BITFOUNDRY_DATA_DIR must be the same path to a folder on a disk that all nodes share.",
                retryable=True,
            )
        time.sleep(LOOK_S)
    where = json.loads(file.read_text())
    return Node(rank, count, where["host"], where["port"], f"{folder.name}.{run}")


def _copy_log(engine: Engine, log: IO[bytes]) -> None:
    for line in engine.log_lines():
        log.write(line if line.endswith(b"\n") else line + b"\n")


if __name__ == "__main__":
    sys.exit(main())
