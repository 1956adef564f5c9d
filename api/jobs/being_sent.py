"""Keeps the files of an artifact as long as somebody is downloading them, also if its job is deleted meanwhile.

The reader holds a lock on the folder, which the kernel releases when the process ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep the folder while this lasts. Raises FileNotFoundError if it is gone already."""
    with _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def is_held(folder: Path) -> bool:
    """Return True while anybody keeps the folder."""
    try:
        with _opened(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is gone
        return False
    return False


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
