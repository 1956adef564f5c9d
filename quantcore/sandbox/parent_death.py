"""Ends a process together with the one that started it. No torch: it must be called before anything slow."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its launcher is gone (prctl(2)): ``torchrun`` gives each rank a session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
