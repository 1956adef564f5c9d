"""Hardware of a plan: the number of devices and their memory, the host, the disk, and their assumed speeds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantcore.config.quantization import SIZE_UNITS
from quantcore.errors import ConfigError

GB = 1_000_000_000


@dataclass(frozen=True)
class Hardware:
    """A number of equal machines, ``num_nodes``.

    Each has ``num_devices`` accelerators of ``device_bytes`` (0: it uses its CPU) and ``host_bytes`` of memory.
    ``disk_bytes`` is the free space for output and model. 0 bytes means unknown and not checked.
    """

    num_devices: int = 0
    device_bytes: int = 0
    num_nodes: int = 1
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def num_ranks(self) -> int:
        """The number of processes of a job: one a device, or one a node."""
        return self.num_nodes * max(1, self.num_devices)

    @property
    def ranks_a_node(self) -> int:
        return max(1, self.num_devices)


@dataclass(frozen=True)
class Speeds:
    """Assumed speeds of one device, or of one node's disk. They are guesses where nothing else is said.

    In flop/s: ``products``, the bfloat16 products of the model; ``grams``, products of its inputs for statistics;
    ``solving``, factorizations and updates. ``step_s`` is the time of the launches for 64 inputs of a tile of rows, in
    seconds. In bytes a second: ``rounding``, float32 values that pass through memory; ``link``, from pinned memory of
    the host to a device; ``exchange``, between ranks of one node; ``network``, between nodes; ``hashing``, SHA-256 of
    one process, in eight threads beside a device.
    """

    title: str
    products: float
    grams: float
    solving: float
    rounding: float
    link: float
    exchange: float
    network: float
    step_s: float = 0.0
    hashing: float = 1e9
    read: float = 7e9
    write: float = 3.5e9


DEVICE = Speeds(
    "a device like an H100: 40 % of 989 TFLOP/s, 25 and 0.3 ms for each 64 inputs to solve",
    products=0.4 * 989e12,
    grams=0.4 * 989e12,
    solving=25e12,
    step_s=0.3e-3,
    rounding=1e12,
    link=25e9,
    exchange=150e9,
    network=25e9,
    hashing=4e9,
)
"""``solving``, ``step_s`` and ``hashing`` were measured with blocks of Llama 3 8B (``make bench-gpu``).

``exchange`` is a third of what NVLink 4 carries one way (NVIDIA H100 data sheet: 900 GB/s in both), ``link`` 40 % of
PCIe 5.0 x16.
"""
HOST = Speeds(
    "a CPU with 1 TFLOP/s",
    products=1e12,
    grams=0.5e12,
    solving=0.3e12,
    rounding=20e9,
    link=20e9,
    exchange=1e9,
    network=1e9,
)


def parse_hardware(devices: str = "", nodes: int = 1, host_memory: str = "", disk: str = "") -> Hardware:
    """Parse arguments such as ``8x80GB``, ``2``, ``1TB``, ``4TB``. Raises ConfigError ``invalid_hardware``."""
    match = re.fullmatch(r"(\d{1,4})x(.+)", devices)
    if devices and (match is None or not int(match[1])):
        raise _invalid("devices", devices, "Use count x memory, such as 8x80GB.")
    if not 1 <= nodes <= 1024:
        raise _invalid("nodes", str(nodes), "Use a whole number from 1 to 1024.")
    return Hardware(
        num_devices=int(match[1]) if match else 0,
        device_bytes=_size("devices", match[2]) if match else 0,
        num_nodes=nodes,
        host_bytes=_size("host_memory", host_memory) if host_memory else 0,
        disk_bytes=_size("disk", disk) if disk else 0,
    )


def _size(field: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([TGM]B)", text.upper())
    size = int(float(match[1]) * SIZE_UNITS[match[2]]) if match else 0
    if not size:
        raise _invalid(field, text, "Use a number and a decimal unit, such as 512MB, 80GB or 1.5TB.")
    return size


def _invalid(field: str, text: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{field} is '{text[:40]}', which is not a valid description of hardware.",
        code="invalid_hardware",
        hint=hint,
        field=f"/hardware/{field}",
    )
