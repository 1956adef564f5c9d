"""How the commands find the service that `bitfoundry up` runs here: one private file in its home."""

import os
from pathlib import Path

from bitfoundry.client.answers import Answer


class Connection(Answer):
    """Where the service is and how to enter; `bitfoundry up` leaves one in its home for the commands."""

    url: str
    api_key: str

    @staticmethod
    def file(home: Path) -> Path:
        return home / "connection.json"

    @classmethod
    def read(cls, home: Path) -> "Connection | None":
        """What the stack in `home` left, None when there is nothing readable."""
        try:
            return cls.model_validate_json(cls.file(home).read_text())
        except (OSError, ValueError):
            return None

    def write(self, home: Path) -> None:
        """Replace the file at once, readable by us alone."""
        partial = self.file(home).with_suffix(f".{os.getpid()}.tmp")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(self.model_dump_json() + "\n")
        partial.replace(self.file(home))
