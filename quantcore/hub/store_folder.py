"""A folder in an object store that an artifact is published to."""

from __future__ import annotations

from collections.abc import Iterable

from quantcore.hub.object_store import open_store
from quantcore.hub.target_folder import TargetFolder

PART_BYTES = 16 << 20
"""The size of one request. A store takes 10,000 of them for a file, so a file may have 160 GB."""
NUM_PARTS = 4  # are sent at once, and are in memory


class StoreFolder(TargetFolder):
    """The folder at a URL. A file appears when all of it has arrived, with its SHA-256 where the store checks it."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def present(self) -> dict[str, int]:
        import obstore

        return {entry["path"]: entry["size"] for entries in obstore.list(self._store) for entry in entries}

    def read(self, path: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._store, path).bytes())

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        import obstore

        obstore.put(self._store, path, parts, chunk_size=PART_BYTES, max_concurrency=NUM_PARTS)

    def remove(self, path: str) -> None:
        import obstore

        obstore.delete(self._store, path)

    def size(self, path: str) -> int:
        import obstore

        return obstore.head(self._store, path)["size"]
