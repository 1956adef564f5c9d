"""A process that ends with the one that started it. No torch: it is to be asked for before anything that takes time."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """The kernel kills this process when its launcher is gone (prctl(2)): ``torchrun`` gives each rank a session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
