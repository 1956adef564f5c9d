"""Files through which a worker and the nodes of an allocation tell each other what they do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

STATE = "allocation.json"
"""The file of a launch that is written last: the id of its allocation, and how much of the other files was read."""


def write_whole(path: Path, text: str) -> None:
    """Write a file that only this user can read. Others see the old text or the new one, and nothing in between.

    Follows no link: an engine may have left one in a folder of its own. Raises FileExistsError if it is that quick.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    beside.replace(path)


class Tail:
    """The lines of ``path`` after ``position``, in bytes. The file need not exist yet."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self.position = position

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines that are new; ``position`` moves on with each.

        The file is opened anew each time: only then does a network disk show what others wrote. What it holds is the
        work of ``worker.on_node``, whose lines are bounded.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # it is being written
                    self.position += len(line)
                    yield line
        except FileNotFoundError:
            return
