"""Real faults for tests: an API process to kill, a connection to the database to cut, a full disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
from pydantic import SecretStr

from api.settings import Settings
from tests.support.service import ROOT, environment_of
from tests.support.waiting import wait_until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ApiProcess:
    """A process of ``python -m api serve``: ``with ApiProcess(settings, log) as api``; ``more``: its variables."""

    def __init__(
        self, settings: Settings, log: Path, *, port: int = 0, prefix: Sequence[str] = (),
        more: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*prefix, sys.executable, "-m", "api", "serve", "--port", str(self.port)]
        self._environment = environment_of(settings) | dict(more or {})
        self._log = log

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        print(self._log.read_text())

    def start(self) -> None:
        with self._log.open("ab") as stream:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=stream, stderr=stream
            )
        wait_until(self._answers, note=self._log.read_text)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        with suppress(httpx2.TransportError):
            httpx2.get(f"{self.url}/healthz/live", trust_env=False)
            return True
        return False

    def stop(self) -> None:
        """End the process in order, as a rolling restart does."""
        self.process.terminate()
        self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Line:
    """A line to PostgreSQL's socket that can be cut: ``with Line(settings) as line``; ``line.settings`` use it.

    ``cut_after_commit(b"INSERT INTO job")``: the next transaction with this statement in it is committed, and the
    connection breaks before the client gets the answer. ``num_cut`` counts the cuts.
    """

    def __init__(self, settings: Settings) -> None:
        url = settings.database_url.get_secret_value()
        sockets = url.partition("host=")[2]
        self._target = f"{sockets}/.s.PGSQL.5432"
        self._folder = Path(tempfile.mkdtemp(prefix="bf-line-", dir="/tmp"))
        line_url = SecretStr(url.replace(sockets, str(self._folder)))
        self.settings = settings.model_copy(update={"database_url": line_url})
        self.num_cut = 0
        self._wanted = b""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / ".s.PGSQL.5432"))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.close()
        shutil.rmtree(self._folder)

    def cut_after_commit(self, statement: bytes) -> None:
        self._wanted = statement

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                upstream = socket.socket(socket.AF_UNIX)
                upstream.connect(self._target)
                _Connection(self, client, upstream)

    def claim_cut(self, data: bytes) -> bool:
        """Return True for the one connection whose transaction is to be cut."""
        if self._wanted and self._wanted in data:
            self._wanted = b""
            return True
        return False


class _Connection:
    def __init__(self, line: Line, client: socket.socket, upstream: socket.socket) -> None:
        self._line = line
        self._client, self._upstream = client, upstream
        self._meant = self._committing = False
        for pump in (self._ask, self._answer):
            threading.Thread(target=pump, daemon=True).start()

    def _ask(self) -> None:
        with suppress(OSError):
            while data := self._client.recv(65536):
                self._meant = self._meant or self._line.claim_cut(data)
                self._committing = self._meant and b"COMMIT" in data
                self._upstream.sendall(data)
        self._close()

    def _answer(self) -> None:
        with suppress(OSError):
            while data := self._upstream.recv(65536):
                if self._committing and b"COMMIT\0" in data:  # committed, and the client does not know
                    self._line.num_cut += 1
                    break
                self._client.sendall(data)
        self._close()

    def _close(self) -> None:
        for end in (self._client, self._upstream):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def on_a_small_disk(folder: Path, *, size: str, filler_bytes: int = 0) -> list[str]:
    """Return the prefix of a command that alone sees a disk of ``size`` at ``folder``, with ``filler_bytes`` taken.

    The disk is a mount in its own namespace, which Linux allows to root, and to others with a user namespace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && head -c "$3" /dev/zero > "$2/filler"; shift 3; exec "$@"'
    return [*in_own_mounts(), "sh", "-c", script, "sh", size, str(folder), str(filler_bytes)]


def in_own_mounts() -> list[str]:
    """Return the prefix of a command whose mounts no other process sees."""
    return ["unshare", *(["-m"] if os.geteuid() == 0 else ["-U", "-r", "-m"])]


def seen_by(process: subprocess.Popen[bytes], folder: Path) -> Path:
    """Return the folder as that process sees it."""
    return Path(f"/proc/{process.pid}/root{folder}")
