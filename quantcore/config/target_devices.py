"""The devices that a result can target: their memory, and the number formats that they multiply. No torch.

Sources: the makers' data sheets for memory; vLLM, "Quantization: supported hardware" (docs.vllm.ai, 0.32) for formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantcore.config.quantization import parse_size
from quantcore.errors import ConfigError, unknown_value


@dataclass(frozen=True)
class Device:
    """A kind of device: its memory (None: that of the machine), and the number formats that its kernels multiply.

    ``w4`` and ``w8``: integer weights with 16-bit activations.
    """

    title: str
    memory_bytes: int | None
    computes: frozenset[str]


def _gpu(title: str, gigabytes: float, computes: str) -> Device:
    return Device(title, round(gigabytes * 1e9), frozenset(computes.split()))


AMPERE, ADA, BLACKWELL = "w4 w8 int8", "w4 w8 int8 fp8", "w4 w8 fp8 nvfp4"
DEVICES: dict[str, Device] = {
    "t4": _gpu("NVIDIA T4", 16, "w4 w8 int8"),
    "a10": _gpu("NVIDIA A10", 24, AMPERE),
    "a100": _gpu("NVIDIA A100 80GB", 80, AMPERE),
    "rtx3090": _gpu("NVIDIA RTX 3090", 24, AMPERE),
    "rtx4090": _gpu("NVIDIA RTX 4090", 24, ADA),
    "l4": _gpu("NVIDIA L4", 24, ADA),
    "l40s": _gpu("NVIDIA L40S", 48, ADA),
    "h100": _gpu("NVIDIA H100", 80, ADA),
    "h200": _gpu("NVIDIA H200", 141, ADA),
    "b200": _gpu("NVIDIA B200", 180, BLACKWELL),
    "rtx5090": _gpu("NVIDIA RTX 5090", 32, BLACKWELL),
    "mi300": _gpu("AMD Instinct MI300X", 192, "fp8"),
    "mi325": _gpu("AMD Instinct MI325X", 256, "fp8"),
    "mi350": _gpu("AMD Instinct MI350X", 288, "fp8 mxfp4"),
    "cpu": Device("x86 CPU", None, frozenset({"w4", "int8"})),
}
ANY_GPU = frozenset({"w4", "w8"})
"""Number formats that are assumed for a GPU of which only the memory is known."""


def device_of(name: str) -> Device:
    """Return the device called ``name``, or a GPU with that memory (``24GB``).

    Raises ConfigError ``unknown_device``.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    try:
        return Device(f"GPU with {name}", parse_size(name), ANY_GPU)
    except ConfigError:
        raise unknown_value("device", name, [*DEVICES, "24GB"], code="unknown_device", field="/goal/device") from None
