"""Bring a database to the newest schema from Python (``alembic upgrade head`` does the same from a shell)."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"


def upgrade(database_url: str, revision: str = "head") -> None:
    command.upgrade(_config(database_url), revision)


def downgrade(database_url: str, revision: str = "base") -> None:
    command.downgrade(_config(database_url), revision)


def check(database_url: str) -> None:
    """Raises if the tables in the code and in the database differ."""
    command.check(_config(database_url))


def _config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["database_url"] = database_url  # not an ini option: % in a password would be expanded there
    return config
