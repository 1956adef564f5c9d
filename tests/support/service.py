"""The service as processes and threads of a test: workers, an API on a socket, models for the stub engine."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import text

from api.settings import Settings
from api.store.accounts import projects
from api.store.engine import Sessions
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
REAL_ENGINE: dict[str, Any] = {
    "engine_command": "{python} {launcher} -m quantcore run",
    "confine_engine": True,
    "lease_s": 15,
}
"""Settings for the real engine, which needs more than a stub's time between two heartbeats."""
STUB_ENGINE = ROOT / "tests" / "support" / "stub_engine.py"


def write_stub_model(folder: Path, *, width: int = 64, **stub: Any) -> Path:
    """Write a model folder with headers that can be planned and orders for the stub engine, and return it."""
    folder.mkdir(parents=True)
    layer = "model.layers.{}.self_attn.q_proj.weight"
    write_safetensors(folder / "model.safetensors", {layer.format(block): [width, width] for block in range(2)})
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": width, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "stub.json").write_text(json.dumps(stub))
    return folder


def write_many_tensors(folder: Path, number: int) -> None:
    """Write a model whose header lists ``number`` tensors of one value."""
    write_stub_model(folder)
    header: dict[str, Any] = {
        f"model.layers.0.tensor{index:020}.weight": {
            "dtype": "F32",
            "shape": [1, 1],
            "data_offsets": [4 * index, 4 * index + 4],
        }
        for index in range(number)
    }
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(4 * number))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of float32 zeros."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(offset))


def job_columns(model_dir: Path | str = "/nowhere", **fields: Any) -> dict[str, Any]:
    """Return the columns of a queued job; ``fields`` are columns, or fields of its JobSpec."""
    options = {name: fields.pop(name) for name in JobSpec.model_fields if name in fields}
    columns = {
        "project_id": projects.DEFAULT,
        "submitted_by": None,
        "name": None,
        "labels": {},
        "model": {"path": str(model_dir)},
        "preset": "fp8",
        "spec": JobSpec(**{"config": presets.resolve("fp8")} | options).to_dict(),
    }
    return columns | fields


@dataclass(frozen=True)
class Server:
    """The API behind a real socket, for tests that a test client cannot do: endless streams."""

    url: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which the commands find the server."""
        return {"BITFOUNDRY_URL": self.url, "BITFOUNDRY_API_KEY": self.key}

    def connect(self) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, trust_env=False, timeout=20)


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the variables that give another process these settings, and a secret that must appear nowhere."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BITFOUNDRY_")}
    for name, value in settings.model_dump(exclude_none=True).items():
        environment[f"BITFOUNDRY_{name.upper()}"] = str(value)
    environment["BITFOUNDRY_SECRET_KEY"] = settings.secret_key.get_secret_value() if settings.secret_key else ""
    environment.pop("BITFOUNDRY_SECRET_KEY_FILE", None)
    environment["BITFOUNDRY_WEBHOOK_NETWORKS"] = ",".join(map(str, settings.webhook_networks))
    environment["BITFOUNDRY_PUBLISH_URLS"] = ",".join(settings.publish_urls)
    environment["BITFOUNDRY_MODEL_URLS"] = ",".join(settings.model_urls)
    environment["BITFOUNDRY_MODEL_ROOTS"] = os.pathsep.join(map(str, settings.model_roots))
    environment["DATABASE_URL"] = settings.database_url.get_secret_value()
    environment["BROKER_URL"] = settings.broker_url.get_secret_value()
    environment["A_PASSWORD"] = "canary-in-the-environment"
    return environment


class WorkerProcess:
    """A process of ``python -m worker``, behind ``prefix``, and with ``more`` in its environment."""

    def __init__(
        self, settings: Settings, log: Path, *, prefix: Sequence[str] = (), more: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        environment = environment_of(settings) | dict(more or {})
        command = [*prefix, sys.executable, "-m", "worker"]
        with log.open("ab") as stream:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def suspend(self, sessions: Sessions) -> None:
        """Send SIGSTOP while it is in no transaction: others would wait half a minute for its locks."""
        busy = "datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'"
        while True:
            self.process.send_signal(signal.SIGSTOP)
            with sessions.begin() as session:
                if not session.scalar(text(f"SELECT count(*) FROM pg_stat_activity WHERE {busy}")):
                    return
            self.process.send_signal(signal.SIGCONT)
            time.sleep(0.05)

    def drain(self, timeout_s: float = PATIENCE_S) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def is_alive(pid: int) -> bool:
    """Return True for a process that exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_empty(folder: Path) -> None:
    wait_until(lambda: not list(folder.iterdir()), note=lambda: list(folder.iterdir()))


def wait_gone(pids: list[int], timeout_s: float = PATIENCE_S) -> None:
    """Wait until none of the processes is alive."""
    wait_until(
        lambda: not any(map(is_alive, pids)),
        timeout_s=timeout_s,
        note=lambda: f"still alive: {[pid for pid in pids if is_alive(pid)]}",
    )


def make_model(home: Path) -> Path:
    """Write a model beside the home that can be planned, but whose job fails, and return its folder."""
    folder = home.with_name("model")
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": [64, 64]})
    return folder
