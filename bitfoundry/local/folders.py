"""Private folders (0700) for the data and sockets of the local stack."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from bitfoundry.errors import StackError
from bitfoundry.local.child import Owner

SOCKET_PATH_LIMIT = 100  # bytes: sun_path holds 104 on macOS and 108 on Linux, the file's name included


def cache_dir() -> Path:
    """Return the cache folder, which may be deleted at any time: below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "bitfoundry"


def private_dir(path: Path, owner: Owner | None = None) -> Path:
    """Make `path` a folder with mode 0700 of `owner` (or us). Raises StackError if it belongs to somebody else."""
    if not hasattr(os, "geteuid"):
        raise StackError(
            "the local service does not run on Windows",
            hint="run it in WSL or in containers; `bitfoundry quantize` works here, and so does the client",
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(path)
    wanted = owner.uid if owner else os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise StackError(f"{path} is not a folder", hint="remove it, or choose another --home")
    if status.st_uid != wanted:
        if os.geteuid() != 0 or status.st_uid != 0:
            raise StackError(
                f"{path} belongs to uid {status.st_uid}, not to {wanted}",
                hint="start as the user who created it, or choose another --home",
            )
        os.chown(path, wanted, owner.gid if owner else -1, follow_symlinks=False)
    path.chmod(0o700)
    return path


def socket_dir(home: Path, name: str, owner: Owner | None = None) -> Path:
    """Return a short private folder for an engine's socket, the same each time for the same home.

    It lies below $XDG_RUNTIME_DIR if that is ours, else below /tmp. If somebody else owns the folder, a fresh one is
    made.
    """
    leaf = socket_leaf(home, name)
    bases = [Path("/tmp")]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and owner is None and os.access(runtime, os.W_OK | os.X_OK):
        bases.insert(0, Path(runtime))
    base = next(base for base in bases if len(os.fsencode(base / leaf)) < SOCKET_PATH_LIMIT - 20)
    try:
        return private_dir(base / leaf, owner)
    except (StackError, OSError):
        return private_dir(Path(tempfile.mkdtemp(prefix="bf-", dir="/tmp")), owner)


def socket_leaf(home: Path, name: str) -> str:
    """Return the name of the socket folder, which differs by user, home and engine."""
    key = hashlib.sha256(f"{os.geteuid()}:{home}".encode()).hexdigest()[:10]
    return f"bf-{key}-{name}"


class SocketWatch:
    """Notices that a server's socket was removed, as cleaners of temporary folders do. At first it may be absent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._was_there = False

    def is_gone(self) -> bool:
        is_there = self._path.exists()
        self._was_there = self._was_there or is_there
        return self._was_there and not is_there


class Lock:
    """A file lock with one holder per home. The kernel releases it when the holder dies, in any way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises StackError with the holder's pid if another process has it."""
        import fcntl  # not on Windows, where commands that need no service run too

        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise StackError(
                f"{self._path.parent} is in use by another bitfoundry (pid {holder or 'unknown'})",
                hint="stop that one with Ctrl-C, or use another --home",
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
