"""The user's TOML file with settings for the commands. Options and the environment take precedence."""

import os
import stat
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bitfoundry.errors import BitfoundryError


class UserConfig(BaseModel):
    """Settings: `url` and `api_key` of the service, `home` of the local stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = None
    api_key: str | None = None
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
            config = cls.model_validate(tomllib.loads(path.read_text("utf-8")))
            mode = path.stat().st_mode
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise BitfoundryError(f"{path}: {place}: {first['msg']}", hint="it may set url, api_key and home") from None
        except (OSError, ValueError) as error:
            raise BitfoundryError(f"{path} cannot be read: {error}", hint='it is TOML: url = "https://..."') from None
        if config.api_key and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BitfoundryError(f"{path} has a key in it and others may read it", hint=f"chmod 600 {path}")
        return config
