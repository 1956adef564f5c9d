"""Child processes that never outlive us: a parent-death signal, an own session, an orderly end.

On Linux the kernel signals a child as soon as the *thread* that started it ends, so that even a `kill -9` of the
parent leaves nothing behind. Start children from the main thread.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitfoundry.errors import StackError

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
TAIL_BYTES = 64 * 1024
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: nothing may be imported after fork


@dataclass(frozen=True)
class Owner:
    """The account for a child that refuses to run as root."""

    name: str
    uid: int
    gid: int

    @classmethod
    def named(cls, *names: str) -> "Owner":
        """Return the first of these accounts that exists. Raises StackError if none does."""
        import pwd  # not on Windows

        for name in names:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)
        raise StackError(
            f"none of the accounts {', '.join(names)} exist on this machine, and PostgreSQL cannot run as root",
            hint="create one (useradd --system postgres) or run as a plain user",
        )

    @classmethod
    def of_uid(cls, uid: int) -> "Owner":
        """Return the account with this uid. Raises StackError without a passwd entry (initdb and postgres need one)."""
        import pwd

        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise StackError(f"uid {uid} owns the data but has no entry in the passwd file") from None
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)


def end_with_parent(death_signal: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the kernel send `death_signal` to the child when we die (Linux only)."""
    parent = os.getpid()

    def arrange() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:  # we died between fork and prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


def spawn(
    args: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    owner: Owner | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, with its output appended to `log` (mode 0600).

    The working directory is entered before the account changes, so it may lie below a folder that `owner` cannot
    traverse. In its own session the child gets no Ctrl-C of the terminal: we decide the order in which children end.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [str(arg) for arg in args],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=None if env is None else dict(env),
            start_new_session=True,
            preexec_fn=end_with_parent(death_signal),
            user=owner.uid if owner else None,
            group=owner.gid if owner else None,
            extra_groups=[] if owner else None,
        )
    finally:
        os.close(descriptor)


def finish(process: subprocess.Popen[bytes], steps: Sequence[tuple[signal.Signals, float]]) -> int:
    """Send each signal and wait its seconds until the child has ended, SIGKILL last; return its status."""
    for step, seconds in (*steps, (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            break
        process.send_signal(step)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def tail(log: Path, lines: int = 8) -> str:
    """Return the last lines of a log, for an error message; empty if it cannot be read."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
