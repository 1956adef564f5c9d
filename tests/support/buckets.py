"""Folders in place of the buckets of an object store, by obstore's own store of files.

A stand-in: the tests that are slow ask a real server, Ceph's (``tests.support.ceph``).
"""

from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore

from quantcore.hub import object_store, store_folder


def use_folders(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let ``s3://bucket/path`` be the folder ``root/bucket/path`` in this process."""

    def open_store(url: str) -> Any:
        return LocalStore(root / url.partition("://")[2].rstrip("/"), mkdir=True)

    for module in (object_store, store_folder):
        patch.setattr(module, "open_store", open_store)
