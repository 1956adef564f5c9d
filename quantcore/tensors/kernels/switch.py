"""Decides where kernels are used. It does not load Triton unless they are."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

logger = logging.getLogger("quantcore")

KERNELS = "BITFOUNDRY_KERNELS"
"""Environment variable; ``off`` lets torch compute everything."""
DEVICES = ("cuda",)
"""The types of devices that run them. Torch calls ROCm's cuda, too."""


def are_used_on(device: torch.device) -> bool:
    """Return True if loops on ``device`` run as kernels. The first call for a GPU compiles a small one."""
    is_asked_for = device.type in DEVICES and os.environ.get(KERNELS) != "off"
    return is_asked_for and find_spec("triton") is not None and _runs_one(device)


@cache
def _runs_one(device: torch.device) -> bool:
    """Try a kernel: Triton needs a C compiler, and a GPU that it knows."""
    from quantcore.tensors.kernels.trial import doubled

    try:
        return doubled(1.0, device) == 2.0
    except Exception as error:  # of a compiler or a driver, of many kinds
        logger.warning("Triton cannot compile kernels here (%s): GPTQ is slower.", type(error).__name__)
        return False
