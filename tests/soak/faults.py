"""The faults. Each is a function that does its harm, waits if it must, and undoes it if nothing else can."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import psycopg

from tests.soak.service import PARTS, Service

Fault = Callable[[Service, random.Random], str]


def kill(service: Service, draw: random.Random) -> str:
    """Kill one process of a part with SIGKILL: PostgreSQL's main one or a backend, the engine's keeper or itself."""
    return _signal(service, draw, signal.SIGKILL)


def end(service: Service, draw: random.Random) -> str:
    """Send SIGTERM to one process of a part."""
    return _signal(service, draw, signal.SIGTERM)


def stop(service: Service, draw: random.Random) -> str:
    """Stop all processes of a part, for less or for more than a lease lasts."""
    part, seconds = draw.choice(PARTS), draw.choice([2, 5, 15])
    processes = service.part(part)
    _send(processes, signal.SIGSTOP)
    time.sleep(seconds)
    _send(processes, signal.SIGCONT)
    return f"{part} for {seconds} s"


def slow(service: Service, draw: random.Random) -> str:
    """Let PostgreSQL run for a tenth of the time, as on a slow disk."""
    for _ in range(20):
        processes = service.part("postgres")
        _send(processes, signal.SIGSTOP)
        time.sleep(0.45)
        _send(processes, signal.SIGCONT)
        time.sleep(0.05)
    return "PostgreSQL for 10 s"


def cut(service: Service, draw: random.Random) -> str:
    """Break every connection to the database."""
    with suppress(psycopg.Error), service.database() as connection:
        mine = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
        ended = connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}").fetchall()
        return f"{len(ended)} connections"
    return "no database"


def fill_disk(service: Service, draw: random.Random) -> str:
    """Fill the disk to the last byte for some seconds."""
    filler, num_bytes, seconds = service.seen_home / "filler", 0, draw.choice([2, 6, 20])
    try:
        with suppress(OSError), filler.open("wb") as file:
            while True:
                num_bytes += file.write(bytes(1 << 20))
                file.flush()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(OSError), filler.open("ab", buffering=0) as file:
                num_bytes += file.write(bytes(4096)) or 0
            time.sleep(0.05)
    finally:
        filler.unlink(missing_ok=True)
    return f"{num_bytes >> 20} MiB for {seconds} s"


def forget(service: Service, draw: random.Random) -> str:
    """Kill the broker, which loses every message: it keeps nothing on disk."""
    _send(service.part("valkey"), signal.SIGKILL)
    return "all messages"


def restart(service: Service, draw: random.Random) -> str:
    """End the whole service in order, and start it again."""
    status = service.stop()
    assert status == 0, f"`up` ended with status {status} after SIGTERM"
    service.start()
    return "in order"


def kill_all(service: Service, draw: random.Random) -> str:
    """Kill the whole service, and start it again."""
    service.kill()
    service.start()
    return "kill -9 of `up`"


# Each with its weight.
FAULTS: dict[Fault, int] = {kill: 8, end: 3, stop: 4, slow: 1, cut: 2, fill_disk: 2, forget: 1, restart: 1, kill_all: 1}


def _signal(service: Service, draw: random.Random, number: signal.Signals) -> str:
    part = draw.choice(PARTS)
    processes = service.part(part)
    if not processes:
        return f"{part}, which does not run"
    # Half of the time the main process, else any.
    process = processes[0] if draw.random() < 0.5 else draw.choice(processes)
    _send([process], number)
    return f"{part}, {'the main process' if process == processes[0] else 'another process'}"


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
