"""Runs the engine behind all other work of the machine, and kills its whole process group when the supervisor dies.

``kill -9`` leaves the supervisor no time to end its engine, so the kernel is asked to tell us: PR_SET_PDEATHSIG
(prctl(2)). Then we kill the group, grandchildren included, and the GPU is free for the next attempt.

    python -I -S parent_watch.py SUPERVISOR_PID DATA_BYTES GROUP COMMAND [ARGUMENT ...]

The engine has the lowest priority: it takes what the API, the worker and the database leave, which is nearly all.

DATA_BYTES is the limit of the memory that each process may ask for (RLIMIT_DATA), 0 for none. GROUP is the file of
processes of a control group that it joins, - for none.

Uses only the standard library, so that this process is small and starts at once. Exits with the engine's status; 128 +
n if signal n ended it.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
LAST = 10


def main(argv: list[str]) -> int:
    supervisor, data_bytes, group, command = int(argv[1]), int(argv[2]), argv[3], argv[4:]
    if data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    if group != "-":
        with open(group, "w") as processes:  # noqa: PTH123  pathlib would cost a third
            processes.write(str(os.getpid()))
    go_last()
    stop_signals: list[int] = []
    # SIGTERM goes to the whole group: the engine acts on it, we wait for the engine.
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != supervisor:  # it died before we could ask
        return 128 + signal.SIGKILL
    engine = subprocess.Popen(command)
    if stop_signals:  # they came before the engine had started
        engine.terminate()
    status = engine.wait()
    return status if status >= 0 else 128 - status


def go_last() -> None:
    """Give this process and its children the lowest priority, as processes and as a group (sched(7), autogroup)."""
    os.nice(LAST)
    with suppress(OSError), open("/proc/self/autogroup", "w") as group:  # noqa: PTH123  pathlib would cost a third
        group.write(str(LAST))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
