"""The system under test: the API as a process, with its own durable PostgreSQL and Valkey, and a model for plans."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import psutil

from api.http.security import create_key
from api.store import migrate
from api.store.engine import connect, dispose
from bitfoundry.local.stack import Postgres, Valkey

START_S = 60.0


class Stack:
    """The system as a context manager, with ``url``, ``key``, ``sessions``, ``broker_url`` and ``model``."""

    def __init__(self, folder: Path, *, num_processes: int = 1) -> None:
        self._folder = folder
        self._num_processes = num_processes
        self._ends = ExitStack()
        self.model = write_model(folder / "models" / "tiny")

    def __enter__(self) -> Self:
        postgres, valkey = Postgres(self._folder / "pg"), Valkey(self._folder / "vk")
        for engine in (postgres, valkey):
            engine.start()
            self._ends.callback(engine.stop)
        migrate.upgrade(postgres.url)
        self.broker_url = valkey.url
        self.sessions = connect(postgres.url)
        self._ends.callback(dispose, self.sessions)
        self.key = create_key(self.sessions, "bench")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._environment = os.environ | {
            "DATABASE_URL": postgres.url,
            "BROKER_URL": valkey.url,
            "BITFOUNDRY_DATA_DIR": str(self._folder / "data"),
            "BITFOUNDRY_MODEL_ROOTS": str(self._folder / "models"),
            "BITFOUNDRY_SECRET_KEY": base64.b64encode(os.urandom(32)).decode(),
            "BITFOUNDRY_REQUESTS_PER_MINUTE": "10000000",
        }
        command = [sys.executable, "-m", "api", "serve", "--port", str(port), "--processes", str(self._num_processes)]
        self._api = subprocess.Popen(command, env=self._environment, stderr=subprocess.DEVNULL)
        self._ends.callback(self._stop_api)
        self._await_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @contextmanager
    def worker(self, broker_url: str) -> Iterator[None]:
        """Run a worker whose engine fails at once, with a long time until the retry."""
        more = {"BROKER_URL": broker_url, "BITFOUNDRY_ENGINE_COMMAND": "false", "BITFOUNDRY_RETRY_BASE_S": "100000"}
        process = subprocess.Popen(
            [sys.executable, "-m", "worker"], env=self._environment | more, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)

    def api_rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._api_processes())

    def api_cpu_s(self) -> float:
        """Return the CPU seconds that the API has used."""
        all_times = [process.cpu_times() for process in self._api_processes()]
        return float(sum(times.user + times.system for times in all_times))

    def _api_processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._api.pid)
        return [process, *process.children()]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/healthz/ready", trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("the API did not start")

    def _stop_api(self) -> None:
        self._api.terminate()
        self._api.wait(20)


def write_model(folder: Path) -> Path:
    """Write a model of two blocks that can be planned, and return its folder."""
    folder.mkdir(parents=True)
    header = {
        f"model.layers.{block}.self_attn.q_proj.weight": {
            "dtype": "F32", "shape": [64, 64], "data_offsets": [block * 16384, (block + 1) * 16384]
        }
        for block in range(2)
    }  # fmt: skip
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(2 * 16384))
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
