"""Finds the service for commands and programs: by arguments, environment, config file, or the local stack.

The stack of `bitfoundry up` writes its address and API key to a private file in its home.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bitfoundry.client.user_config import UserConfig
from bitfoundry.errors import BitfoundryError

NO_SERVICE = "no_service"


@dataclass(frozen=True)
class Connection:
    """The address of a service and an API key for it; `bitfoundry up` saves one in its home for the commands."""

    url: str
    api_key: str = field(repr=False)

    @staticmethod
    def file(home: Path) -> Path:
        return home / "connection.json"

    @classmethod
    def read(cls, home: Path) -> "Connection | None":
        """Return the connection that the stack in `home` saved, or None if no file can be read."""
        try:
            saved = json.loads(cls.file(home).read_text())
            return cls(str(saved["url"]), str(saved["api_key"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None

    @classmethod
    def find(cls, url: str | None = None, api_key: str | None = None, home: Path | None = None) -> "Connection":
        """Find the service of the arguments, else of the environment, the config file, or the local stack in `home`.

        The variables are BITFOUNDRY_URL and BITFOUNDRY_API_KEY. Raises BitfoundryError if no service or no key for it
        is found."""
        if url and api_key:
            return cls(url=url, api_key=api_key)
        config = UserConfig.read()
        url = url or os.environ.get("BITFOUNDRY_URL") or config.url
        api_key = api_key or os.environ.get("BITFOUNDRY_API_KEY")
        api_key = api_key or (config.api_key if url == config.url else None)  # never sent to another service
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
        """Replace the file atomically, readable by this user alone."""
        partial = self.file(home).with_suffix(f".{os.getpid()}.tmp")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(json.dumps(asdict(self)) + "\n")
        partial.replace(self.file(home))


def default_home() -> Path:
    """Return the data folder: $BITFOUNDRY_HOME, else bitfoundry below $XDG_DATA_HOME or ~/.local/share."""
    if home := os.environ.get("BITFOUNDRY_HOME"):
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser().absolute() / "bitfoundry"


def find_home(home: Path | None) -> Path:
    """Return the local stack's home: of the option, the environment, the config file, or the default."""
    chosen = home or (None if os.environ.get("BITFOUNDRY_HOME") else UserConfig.read().home) or default_home()
    return chosen.expanduser().absolute()
