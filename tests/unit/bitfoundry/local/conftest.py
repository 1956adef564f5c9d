"""A home for the engines of one test, and no trace of it afterwards."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitfoundry.local.folders import socket_leaf


@pytest.fixture
def home() -> Iterator[Path]:
    """Below a folder that no other account may enter, as root's own is. A killed server leaves its socket's folder."""
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as folder:
        home = Path(folder).resolve() / "below" / "home"
        yield home
        for base in ("/tmp", os.environ.get("XDG_RUNTIME_DIR", "/tmp")):
            for engine in ("pg", "vk"):
                shutil.rmtree(Path(base) / socket_leaf(home, engine), ignore_errors=True)
