"""The cells of the fault matrix: a part of the service, a fault, and what brings it about; or why there is none.

A fault is a context manager that does its harm on entry, and undoes on exit what nothing else would undo.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import psutil
import redis

from tests.faults.rig import Rig
from tests.support.waiting import wait_until

AWAY_S = 7.0
"""A minute, scaled as the leases are: 10 s instead of 90."""
LONG_S = 15.0
"""Longer than a lease."""

Fault = Callable[[Rig], AbstractContextManager[None]]


@dataclass(frozen=True)
class Cell:
    """A cell: its ``fault`` lasts ``seconds``; without one ``reason`` says why. ``mode`` is that of the job under way,
    ``code`` the error with which it must end, if any."""

    part: str
    kind: str
    fault: Fault | None = None
    seconds: float = AWAY_S
    reason: str = ""
    mode: str = "long"
    code: str = ""


def send(rig: Rig, part: str, number: signal.Signals, *, main_only: bool = False) -> None:
    processes = rig.part(part)
    for process in processes[:1] if main_only else processes:
        with suppress(psutil.Error):
            process.send_signal(number)


@contextmanager
def killed(rig: Rig, part: str) -> Iterator[None]:
    """Kill it once: what tends it starts it again."""
    send(rig, part, signal.SIGKILL, main_only=part == "postgres")
    yield


@contextmanager
def repeated(step: Callable[[threading.Event], None]) -> Iterator[None]:
    """Repeat ``step`` in a thread meanwhile. It ends its waits when the event is set."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            step(over)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def away(rig: Rig, part: str) -> Iterator[None]:
    """Kill it as often as it comes."""

    def kill(over: threading.Event) -> None:
        send(rig, part, signal.SIGKILL)
        over.wait(0.05)

    with repeated(kill):
        yield


@contextmanager
def hung(rig: Rig, part: str) -> Iterator[None]:
    send(rig, part, signal.SIGSTOP)
    try:
        yield
    finally:
        send(rig, part, signal.SIGCONT)


@contextmanager
def slow(rig: Rig, part: str) -> Iterator[None]:
    """Let it run for a tenth of the time."""

    def brake(over: threading.Event) -> None:
        send(rig, part, signal.SIGSTOP)
        over.wait(0.18)
        send(rig, part, signal.SIGCONT)
        over.wait(0.02)

    with repeated(brake):
        yield


@contextmanager
def broker_set(rig: Rig, do: Callable[[redis.Redis], object], undo: Callable[[redis.Redis], object]) -> Iterator[None]:
    with redis.Redis(unix_socket_path=rig.broker_path) as broker:
        do(broker)
        try:
            yield
        finally:
            undo(broker)


@contextmanager
def read_only_database(rig: Rig) -> Iterator[None]:
    """As a standby is, or one that its operator has closed: for all new transactions of all connections."""

    def turn(value: str) -> None:
        with rig.database() as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
            connection.execute("SELECT pg_reload_conf()")

    turn("on")
    try:
        yield
    finally:
        turn("off")


@contextmanager
def read_only_disk(rig: Rig) -> Iterator[None]:
    """The disk of the data folder is read-only; the database's is not."""

    def remount(option: str) -> None:
        wait_until(lambda: subprocess.run(["mount", "-o", f"remount,{option}", rig.data]).returncode == 0)

    remount("ro")
    try:
        yield
    finally:
        remount("rw")


@contextmanager
def full(rig: Rig, disk: str) -> Iterator[None]:
    """Fill the disk of the data folder, or of the database, to its last byte, and keep it so."""
    folder = rig.data if disk == "data" else rig.postgres_disk
    filler, over = folder / "filler", threading.Event()

    def fill() -> None:
        with filler.open("ab", buffering=0) as file:
            while not over.is_set():
                with suppress(OSError):
                    file.write(bytes(1 << 20 if psutil.disk_usage(str(folder)).free > 1 << 20 else 4096))
                    continue
                over.wait(0.02)

    thread = threading.Thread(target=fill)
    thread.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        over.set()
        thread.join()
        filler.unlink()


@contextmanager
def database_clock(rig: Rig, seconds: float) -> Iterator[None]:
    """The clock that our statements see jumps: a function of the same name goes before PostgreSQL's."""

    def turn(*statements: str) -> None:
        with rig.database() as connection:
            for statement in statements:
                connection.execute(statement)

    turn(
        "CREATE OR REPLACE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS"
        f" $$ SELECT pg_catalog.clock_timestamp() + interval '{seconds} s' $$",
        "ALTER ROLE ALL SET search_path = public, pg_catalog",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        " AND pid <> pg_backend_pid()",
    )
    try:
        yield
    finally:
        turn(
            "ALTER ROLE ALL RESET search_path",
            "DROP FUNCTION public.clock_timestamp()",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            " AND pid <> pg_backend_pid()",
        )


@contextmanager
def process_clock(rig: Rig, seconds: float) -> Iterator[None]:
    """The clock of the API and the workers jumps."""
    rig.clock.write_text(str(seconds))
    try:
        yield
    finally:
        rig.clock.write_text("0")


@contextmanager
def nothing(rig: Rig) -> Iterator[None]:
    """The job itself is the fault."""
    yield


def _signals(part: str, **more: str) -> list[Cell]:
    kinds = {"killed": killed, "hung": hung, "slow": slow, "back after 60 s": away}
    lasting = {"hung": LONG_S}
    return [
        Cell(part, kind, partial(fault, part=part), lasting.get(kind, AWAY_S))
        for kind, fault in kinds.items()
        if kind not in more
    ] + [Cell(part, kind, reason=reason) for kind, reason in more.items()]


KINDS = ("killed", "hung", "slow", "full", "read-only", "back after 60 s")
CLOCKS = ("an hour ahead", "an hour back")
NO_DISK_PROCESS = "A disk is no process. One that is gone gives errors as a read-only one does."
NEEDS_DEVICE = "Needs a block device that holds its answers back (dm-delay), which a test may not set up."
SEE_DISK = "It keeps nothing but files on the service's disk: see the disk."
CELLS: list[Cell] = [
    *_signals("postgres"),
    Cell("postgres", "full", partial(full, disk="postgres")),
    Cell("postgres", "read-only", read_only_database),
    *_signals("valkey"),
    Cell(
        "valkey", "full",
        partial(broker_set, do=lambda b: b.config_set("maxmemory", 1), undo=lambda b: b.config_set("maxmemory", 0)),
    ),
    Cell(
        "valkey", "read-only",
        partial(broker_set, do=lambda b: b.replicaof("127.0.0.1", "1"), undo=lambda b: b.replicaof("NO", "ONE")),
    ),
    Cell("disk", "killed", reason=NO_DISK_PROCESS),
    Cell("disk", "hung", reason=NEEDS_DEVICE),
    Cell("disk", "slow", reason=NEEDS_DEVICE),
    Cell("disk", "full", partial(full, disk="data")),
    Cell("disk", "read-only", read_only_disk),
    Cell("disk", "back after 60 s", reason="As read-only: it is what a lost disk looks like until it is back."),
    *_signals("worker", **{"full": SEE_DISK, "read-only": SEE_DISK}),
    *_signals("engine", **{"back after 60 s": "Its worker starts another one at once: see killed."}),
    Cell("engine", "full", nothing, mode="eats", code="memory_limit"),
    Cell("engine", "read-only", reason=SEE_DISK),
    *_signals("api", **{"full": "It runs out of connections: see F57 in failure modes.", "read-only": SEE_DISK}),
    Cell("clock of the database", "an hour ahead", partial(database_clock, seconds=3600)),
    Cell("clock of the database", "an hour back", partial(database_clock, seconds=-3600)),
    Cell("clock of API and worker", "an hour ahead", partial(process_clock, seconds=3600)),
    Cell("clock of API and worker", "an hour back", partial(process_clock, seconds=-3600)),
]  # fmt: skip
