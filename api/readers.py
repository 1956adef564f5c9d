"""Lets confined processes read models: the API itself parses no file of a stranger.

``quantcore.cli.readers`` is started once, with a clean environment, and forks a child for each request.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from api import confinement
from api.settings import Settings
from quantcore.cli.readers import Request
from quantcore.config.job_spec import JobSpec
from quantcore.errors import ModelError, QuantError
from quantcore.hub import object_store
from quantcore.hub.names import is_store_url
from quantcore.plan.hardware import Hardware

KEPT_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME",
    "HF_ENDPOINT", "HF_HUB_CACHE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE",
)  # fmt: skip
SECONDS = 60
"""Processor time of a request; in time it may take twice as long, most of it on the network."""


class Readers:
    """The process that reads models, started at the first request and again if it is gone. Safe for threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def plan(
        self,
        model: Mapping[str, Any],
        specs: Sequence[JobSpec],
        hardware: Hardware | None = None,
        *,
        token: str | None = None,
    ) -> dict[str, Any]:
        """Return ``{"sha": ..., "plans": [...]}`` for ``specs``; see ``quantcore.cli.readers``.

        ``model`` has a real ``path``, or an ``id`` and a ``revision``. Raises QuantError for a model that cannot be
        read; an entry of ``plans`` may be an error as well.
        """
        return self._ask(model, tuple(specs), hardware, token)

    def inspect(self, model: Mapping[str, Any], *, token: str | None = None) -> dict[str, Any]:
        """Return ``{"sha": ..., "inspection": {...}}``. Raises QuantError."""
        return self._ask(model, None, None, token)

    def copy(self, model: Mapping[str, Any], folder: Path, what: Literal["outline", "tokenizer"]) -> str:
        """Copy the outline or the tokenizer of a model in an object store to a new ``folder``. Returns its ``sha``.

        The process that does this has the keys of the store, and reads no model. Raises QuantError.
        """
        request = Request(model_id=model["id"], revision=model["revision"], into=str(folder), what=what)
        return str(self._send(request, folder.parent, {}, with_store=True)["sha"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._requests is not None:
                self._requests.close()
                self._requests = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _ask(
        self, model: Mapping[str, Any], specs: Sequence[JobSpec] | None, hardware: Hardware | None, token: str | None
    ) -> dict[str, Any]:
        with _scratch() as folder:
            if "path" in model:
                request = Request(path=model["path"], specs=specs, hardware=hardware)
                return self._send(request, folder, {"model_dir": model["path"]})
            if is_store_url(model["id"]):
                return self._ask_of_copy(model, folder / "model", specs, hardware)
            request = Request(
                model_id=model["id"], revision=model["revision"], token=token, specs=specs, hardware=hardware
            )
            return self._send(request, folder, {}, with_hub=True)

    def _ask_of_copy(
        self, model: Mapping[str, Any], outline: Path, specs: Sequence[JobSpec] | None, hardware: Hardware | None
    ) -> dict[str, Any]:
        """Ask one process to draw the outline of a model, and another one to read it."""
        sha = self.copy(model, outline, "outline")
        request = Request(path=str(outline), is_outline=True, specs=specs, hardware=hardware)
        try:
            return self._send(request, outline.parent, {"model_dir": str(outline)}) | {"sha": sha}
        except QuantError as error:
            error.message = error.message.replace(str(outline), model["id"])  # the folder is ours, not the user's
            raise

    def _send(
        self,
        request: Request,
        folder: Path,
        task: Mapping[str, Any],
        *,
        with_hub: bool = False,
        with_store: bool = False,
    ) -> dict[str, Any]:
        """Return the answer of a new child that may write in ``folder`` and read the model of the ``task``."""
        rules, variables = None, {"TMPDIR": str(folder)}
        own = object_store.key_files() if with_store else []
        if self._settings.confine_engine:
            reach = confinement.reach_of(
                self._settings, folder, task, with_hub=with_hub, with_store=with_store, own=own
            )
            rules, variables = reach.rules(), reach.environment()
        if with_store:
            variables = variables | object_store.key_variables()
        memory_bytes = self._settings.reader_memory_bytes
        request = replace(request, rules=rules, variables=variables, memory_bytes=memory_bytes, seconds=SECONDS)
        with self._connect() as connection, connection.makefile("rwb") as stream:
            connection.settimeout(3 * SECONDS)
            try:
                pickle.dump(request, stream)
                stream.flush()
                answer = json.loads(stream.read())
            except (OSError, ValueError) as error:  # the child's end is closed when it is killed
                raise _unreadable() from error
        if "error" in answer:
            raise error_of(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _connect(self) -> socket.socket:
        """Return a connection to a new child."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for is_last in (False, True):
                try:
                    socket.send_fds(self._running(), [b"r"], [theirs.fileno()])
                    return ours
                except OSError:  # it is gone
                    self._requests = None
                    if is_last:
                        ours.close()
                        raise
        raise AssertionError("unreachable")

    def _running(self) -> socket.socket:
        """Return the socket of the process that takes requests. Starts it if there is none."""
        if self._requests is None:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "quantcore.cli.readers", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=kept | {"OMP_NUM_THREADS": "1", "HF_TOKEN_PATH": os.devnull},
                )
            self._requests = ours
        return self._requests


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yield the folder of a request, and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bitfoundry-reader-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def error_of(described: Mapping[str, Any]) -> QuantError:
    """Return the error that a confined process has described with ``QuantError.to_dict``."""
    fields = {name: described[name] for name in ("code", "hint", "field", "allowed", "retryable")}
    return QuantError(described["message"], **fields)


def _unreadable() -> ModelError:
    return ModelError(
        "The model's headers cannot be read: the process that read them was killed.",
        code="unreadable_model",
        hint="It took too much time or memory. The files are damaged or malicious.",
    )
