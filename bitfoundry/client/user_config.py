"""The user's TOML file with settings for the commands. Options and the environment take precedence."""

import os
import stat
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from bitfoundry.errors import BitfoundryError


@dataclass(frozen=True)
class UserConfig:
    """Settings: `url` and `api_key` of the service, `home` of the local stack."""

    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    home: Path | None = None

    @staticmethod
    def file() -> Path:
        """Return the path: $BITFOUNDRY_CONFIG, else bitfoundry/config.toml below $XDG_CONFIG_HOME or ~/.config."""
        if chosen := os.environ.get("BITFOUNDRY_CONFIG"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "bitfoundry" / "config.toml"

    @classmethod
    def read(cls) -> "UserConfig":
        """Read the file, or return empty settings if there is none.

        Raises BitfoundryError for an invalid file, and for one that has a key in it and may be read by others."""
        path = cls.file()
        try:
            given = tomllib.loads(path.read_text("utf-8"))
            mode = path.stat().st_mode
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise BitfoundryError(f"{path} cannot be read: {error}", hint='it is TOML: url = "https://..."') from None
        known = {each.name for each in fields(cls)}
        if wrong := [name for name, value in given.items() if name not in known or not isinstance(value, str)]:
            fault = "must be a text" if wrong[0] in known else "is not a setting"
            raise BitfoundryError(f"{path}: {wrong[0]} {fault}", hint="it may set url, api_key and home")
        config = cls(given.get("url"), given.get("api_key"), Path(given["home"]) if "home" in given else None)
        if config.api_key and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BitfoundryError(f"{path} has a key in it and others may read it", hint=f"chmod 600 {path}")
        return config
