"""The only module that looks up the device and its memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

from quantcore.errors import unknown_value

DEVICE = "BITFOUNDRY_DEVICE"
"""Environment variable that names the default device; the self-test sets it, also for the process of the proof."""
MEMORY = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def default_device() -> torch.device:
    """Return the accelerator if torch sees one (CUDA, ROCm, ...), else the CPU; ``DEVICE`` names another."""
    if DEVICE in os.environ:
        return torch.device(os.environ[DEVICE])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def named_device(name: str | None) -> torch.device:
    """Return the device called ``name``, None for the default one. Raises ConfigError if this machine has none."""
    if name is None:
        return default_device()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = ["cpu"]
    if accelerator is not None:
        names += [accelerator.type, *(f"{accelerator.type}:{one}" for one in range(torch.accelerator.device_count()))]
    if name not in names:
        raise unknown_value("device", name, names, code="unknown_device")
    return torch.device(name)


def about(device: torch.device) -> dict[str, str | int]:
    """Return the type of ``device`` and, if torch reports them, its name and memory size."""
    found: dict[str, str | int] = {"type": device.type}
    if device.type == "cpu":
        return found
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    if name_of is not None:
        found["name"] = name_of(device)
    with suppress(RuntimeError, NotImplementedError):  # not every backend counts its memory
        found["memory_bytes"] = torch.accelerator.get_memory_info(device)[1]
    return found


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def limit_threads() -> int:
    """Use ``OMP_NUM_THREADS`` threads, or all cores this process may run on; returns their number."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or _num_cores())
    torch.set_num_threads(threads)
    return threads


def _num_cores() -> int:
    """Return the number of cores that this process may run on.

    It is that of all cores if the system does not tell (macOS, Windows).
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_freed_memory(*, of_device: bool = False) -> None:
    """Give freed host memory back to the system. glibc keeps it otherwise, and memory grows with the model's depth.

    ``of_device``: also free memory of an accelerator that torch caches; another process may need it.
    """
    if of_device and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "win32":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc only
        libc.malloc_trim(0)


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of ``device``; of the host, as far as the system and the container's limit allow."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    available = re.findall(r"^MemAvailable:\s*(\d+) kB$", _text(MEMORY), re.MULTILINE)
    free = [int(kilobytes) * 1024 for kilobytes in available]
    if sys.platform != "linux":
        import psutil

        free.append(psutil.virtual_memory().available)
    limit, used = (_text(CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():  # "max" is no limit
        free.append(int(limit) - int(used))
    return max(0, min(free, default=sys.maxsize))


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far (host), plus torch's peak on its accelerator."""
    return _peak_resident_bytes() + (
        torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    )


def held_memory_bytes() -> int | None:
    """Return this process's resident size now, plus torch's memory on its accelerator.

    Returns None if the system does not tell.
    """
    resident = _status_bytes("VmRSS")
    if resident is None:
        return None
    return resident + (torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0)


def _peak_resident_bytes() -> int:
    """Return Linux's own count: ``getrusage`` also counts the parent's memory from before it started us."""
    num_bytes = _status_bytes("VmHWM")
    if num_bytes is not None:
        return num_bytes
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _status_bytes(name: str) -> int | None:
    match = re.search(rf"^{name}:\s*(\d+) kB$", _text(Path("/proc/self/status")), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _text(file: Path) -> str:
    """Read a ``file`` of the system; empty if it has no such file."""
    try:
        return file.read_text("utf-8")
    except OSError:
        return ""
