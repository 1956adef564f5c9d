"""Checks of this machine and of the service. Each problem comes with a fix."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import httpx2
from pydantic import BaseModel, ConfigDict

from bitfoundry.client.connection import NO_SERVICE
from bitfoundry.client.service import Client
from bitfoundry.errors import ApiError, BitfoundryError

MIN_FREE_BYTES = 5 * 10**9
MAX_CLOCK_S = 60.0
TORCH_LIMIT_S = 120.0
ASK_TORCH = """
import json, torch
device, names = torch.accelerator.current_accelerator(check_available=True), []
if device is not None:
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda number: f"{device.type}:{number}")
    names = [name_of(number) for number in range(torch.accelerator.device_count())]
print(json.dumps({"version": torch.__version__, "devices": names}))
"""


class Finding(BaseModel):
    """The result of a check: `ok`, `warning` (works with limitations) or `failed`; `hint` is the remedy."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    hint: str = ""


def look(home: Path, connect: Callable[[], Client]) -> Iterator[Finding]:
    """Yield all findings, those of this machine first. `connect` connects to the service as the commands do."""
    yield Finding(name="python", status="ok", detail=platform.python_version())
    yield from _torch()
    yield _disk(home)
    yield _landlock()
    try:
        client = connect()
    except BitfoundryError as error:
        if error.code == NO_SERVICE:  # the engine works without one
            yield Finding(name="service", status="ok", detail="none configured, not checked", hint=error.hint)
            return
        yield Finding(name="service", status="failed", detail=error.message, hint=error.hint)
        return
    with client:
        yield from _service(client)


def _torch() -> Iterator[Finding]:
    """Check torch in a separate process: its import takes seconds, and a broken driver may crash the process."""
    if find_spec("torch") is None:
        hint = "needed only where jobs run: pip install 'bitfoundry[engine]'"
        yield Finding(name="torch", status="warning", detail="not installed", hint=hint)
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=True
        )
        report = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        hint = "install a build of torch for this machine's driver"
        yield Finding(name="torch", status="failed", detail=f"cannot be imported ({type(error).__name__})", hint=hint)
        return
    yield Finding(name="torch", status="ok", detail=report["version"])
    if report["devices"]:
        hint = "compare what it computes with the CPU: bitfoundry selftest"
        yield Finding(name="devices", status="ok", detail=", ".join(report["devices"]), hint=hint)
    elif driver := next((name for name in ("nvidia-smi", "rocm-smi") if shutil.which(name)), None):
        hint = "install a build of torch for this driver (CUDA or ROCm)"
        yield Finding(
            name="devices", status="warning", detail=f"{driver} is installed, but torch sees no GPU", hint=hint
        )
    else:
        yield Finding(name="devices", status="ok", detail="no GPU; jobs run on the CPU")


def _disk(home: Path) -> Finding:
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 1e9:,.1f} GB free at {existing}"
    if free < MIN_FREE_BYTES:
        hint = "free disk space for artifacts and models: delete jobs, or use another folder (--home, BITFOUNDRY_HOME)"
        return Finding(name="disk", status="warning", detail=detail, hint=hint)
    return Finding(name="disk", status="ok", detail=detail)


def _landlock() -> Finding:
    """Check whether this kernel can restrict engines to the files of their job."""
    from quantcore.sandbox.landlock import abi  # here: the client works without the engine

    if number := abi():
        return Finding(
            name="landlock", status="ok", detail=f"ABI {number}: engines can access only the files of their job"
        )
    hint = "use Linux 5.19 or later with landlock in /sys/kernel/security/lsm; see docs/concepts/confinement.md"
    return Finding(name="landlock", status="warning", detail="not supported by this kernel", hint=hint)


def _service(client: Client) -> Iterator[Finding]:
    try:
        answer = client.readiness()
    except ApiError as error:
        yield Finding(name="service", status="failed", detail=error.message, hint=error.hint)
        return
    yield Finding(name="service", status="ok", detail=f"{client.base_url} answers")
    yield _clock(answer)
    parts = answer.json()
    yield _part(parts, "database", "ok", "failed", "start PostgreSQL or correct DATABASE_URL; see the API log")
    yield _part(parts, "broker", "ok", "warning", "start Valkey or correct BROKER_URL; without it jobs start later")
    if parts.get("disk"):
        hint = "free space on the disk of the service's data folder; new jobs and files are refused until then"
        yield _part(parts, "disk", "ok", "failed", hint, name="room")
    if parts.get("schema"):
        yield _part(parts, "schema", "current", "failed", "run `alembic upgrade head` with the service's DATABASE_URL")
    try:
        key = client.account.own_key()
    except ApiError as error:
        yield Finding(name="key", status="failed", detail=error.message, hint="set BITFOUNDRY_API_KEY to a valid key")
        return
    yield Finding(name="key", status="ok", detail=f"{key.name}: {', '.join(key.scopes)}")
    yield _workers(client, key.scopes)


def _clock(answer: httpx2.Response) -> Finding:
    try:
        away_s = (datetime.now(UTC) - parsedate_to_datetime(answer.headers["Date"])).total_seconds()
    except (KeyError, ValueError):
        return Finding(name="clock", status="warning", detail="unknown: the service sent no Date header")
    if abs(away_s) > MAX_CLOCK_S:
        detail = f"{abs(away_s):.0f} s {'ahead of' if away_s > 0 else 'behind'} the service"
        return Finding(name="clock", status="warning", detail=detail, hint="synchronize both clocks (NTP)")
    return Finding(name="clock", status="ok", detail="in sync")


def _part(
    parts: dict[str, str], part: str, good: str, otherwise: Literal["warning", "failed"], hint: str, *, name: str = ""
) -> Finding:
    name, detail = name or part, parts.get(part, "unknown")
    if detail == good:
        return Finding(name=name, status="ok", detail=detail)
    return Finding(name=name, status=otherwise, detail=detail, hint=hint)


def _workers(client: Client, scopes: list[str]) -> Finding:
    if "operator" not in scopes:
        return Finding(name="workers", status="ok", detail="not checked: needs a key with the scope operator")
    workers = client.account.workers()
    ready = [worker for worker in workers if worker.state == "ready"]
    devices = sum(len(worker.devices) for worker in ready)
    blocked = [worker for worker in workers if worker.state == "blocked"]
    draining = len(workers) - len(ready) - len(blocked)
    detail = f"{len(ready)} ready with {devices} GPU(s), {draining} draining, {len(blocked)} blocked"
    if not ready and blocked:
        hint = f"{blocked[0].blocked_reason}; they resume automatically when this is resolved"
        return Finding(name="workers", status="failed", detail=detail, hint=hint)
    if not ready and draining:
        hint = f"let one take jobs again: bitfoundry workers uncordon {workers[0].id}"
        return Finding(name="workers", status="failed", detail=detail, hint=hint)
    if not ready:
        return Finding(name="workers", status="failed", detail=detail, hint="start a worker: python -m worker")
    return Finding(name="workers", status="ok", detail=detail)
