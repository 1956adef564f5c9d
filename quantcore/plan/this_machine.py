"""The memory of this machine, and its accelerators as their drivers report them. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

AMD_CARDS = Path("/sys/class/drm")
MIB = 1 << 20
TIMEOUT_S = 10

Device = dict[str, Any]  # {kind, name, memory_bytes, used_bytes}; used_bytes is None where the driver does not say


def host_memory_bytes() -> int:
    """Return this machine's memory, or as much of it as this container may use (cgroup v2)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total  # "max" is no limit


def find_devices() -> list[Device]:
    """Return the accelerators; an empty list where jobs run on the CPU."""
    return [*_nvidia(), *_amd(AMD_CARDS)]


def _nvidia() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia(output)


def parse_nvidia(said: str) -> list[Device]:
    """Parse lines like ``NVIDIA H100 80GB HBM3, 81559, 1024``: name, total and used memory in MiB."""
    rows = ([part.strip() for part in line.rsplit(",", 2)] for line in said.splitlines())
    return [
        {"kind": "cuda", "name": row[0], "memory_bytes": int(row[1]) * MIB, "used_bytes": _mib(row[2])}
        for row in rows
        if len(row) == 3 and row[1].isdecimal()
    ]


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None


def _amd(cards: Path) -> list[Device]:
    """Return the cards of the amdgpu driver, which describes them in files."""
    devices = []
    for file in sorted(cards.glob("card[0-9]*/device/mem_info_vram_total")):
        try:
            memory_bytes = int(file.read_text())
        except (OSError, ValueError):
            continue
        try:
            name = file.with_name("product_name").read_text().strip()
        except OSError:
            name = ""
        try:
            used_bytes = int(file.with_name("mem_info_vram_used").read_text())
        except (OSError, ValueError):
            used_bytes = None
        devices.append(
            {"kind": "rocm", "name": name or "AMD GPU", "memory_bytes": memory_bytes, "used_bytes": used_bytes}
        )
    return devices
