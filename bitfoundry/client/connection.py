"""How commands and programs find the service: named, by the environment, in the config file, or running here.

The stack of `bitfoundry up` leaves one private file in its home, which says where it is.
"""

import os
from pathlib import Path

from bitfoundry.client.answers import Answer
from bitfoundry.client.user_config import UserConfig
from bitfoundry.errors import BitfoundryError

NO_SERVICE = "no_service"


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

    @classmethod
    def find(cls, url: str | None = None, api_key: str | None = None, home: Path | None = None) -> "Connection":
        """The service of the arguments, else of BITFOUNDRY_URL and BITFOUNDRY_API_KEY, else of the config file, else
        the one that `bitfoundry up` runs in `home`. BitfoundryError where there is none, or no key for it."""
        config = UserConfig.read()
        url = url or os.environ.get("BITFOUNDRY_URL") or config.url
        api_key = api_key or os.environ.get("BITFOUNDRY_API_KEY")
        api_key = api_key or (config.api_key if url == config.url else None)  # never to another service than its own
        local = cls.read(find_home(home))
        if not url and not local:
            raise BitfoundryError(
                "No service is configured",
                hint="Start one with `bitfoundry up`, or set its address and an API key.",
                code=NO_SERVICE,
            )
        chosen = url or (local.url if local else "")
        key = api_key or (local.api_key if local and chosen == local.url else "")
        if not key:
            raise BitfoundryError(f"{chosen} needs an API key", hint="give --api-key or set BITFOUNDRY_API_KEY")
        return cls(url=chosen, api_key=key)

    def write(self, home: Path) -> None:
        """Replace the file at once, readable by us alone."""
        partial = self.file(home).with_suffix(f".{os.getpid()}.tmp")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(self.model_dump_json() + "\n")
        partial.replace(self.file(home))


def default_home() -> Path:
    """The data folder: $BITFOUNDRY_HOME, else bitfoundry below $XDG_DATA_HOME or ~/.local/share."""
    if home := os.environ.get("BITFOUNDRY_HOME"):
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser().absolute() / "bitfoundry"


def find_home(home: Path | None) -> Path:
    """The local stack's: of the option, the environment, the config file, or the usual one."""
    chosen = home or (None if os.environ.get("BITFOUNDRY_HOME") else UserConfig.read().home) or default_home()
    return chosen.expanduser().absolute()
