"""A folder to publish to: on this machine (``LocalFolder``) or in an object store (``StoreFolder``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable


class TargetFolder(ABC):
    """A folder that artifacts are published to. Paths are relative to it."""

    @abstractmethod
    def present(self) -> dict[str, int]:
        """Return path -> size in bytes of everything in the folder now, other folders' files included."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the contents of a file."""

    @abstractmethod
    def write(self, path: str, parts: Iterable[bytes]) -> None:
        """Write a new file in the place of what is there."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes, as it is stored."""
