"""Brings a database to the newest schema from Python (``alembic upgrade head`` does the same from a shell)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.orm import Session

from quantcore.errors import ConfigError

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the database to the schema of ``revision``. Raises ConfigError ``newer_schema`` if it is a newer one."""
    try:
        command.upgrade(_config(database_url), revision)
    except CommandError as error:
        if "Can't locate revision" not in str(error):
            raise
        raise ConfigError(
            "The database belongs to a newer release than this program.",
            code="newer_schema",
            hint="Install that release again, or restore a backup made before the upgrade.",
        ) from error


def downgrade(database_url: str, revision: str = "base") -> None:
    command.downgrade(_config(database_url), revision)


def check(database_url: str) -> None:
    """Check that the tables in the code and in the database agree; raises if they differ."""
    command.check(_config(database_url))


@cache
def revisions() -> tuple[str, ...]:
    """Return all revisions, the oldest first."""
    steps = ScriptDirectory(str(MIGRATIONS)).walk_revisions()
    return tuple(step.revision for step in steps)[::-1]


def newest() -> str:
    """Return the revision that this code was written for."""
    return revisions()[-1]


def current(session: Session) -> str | None:
    """Return the revision that a database has; None for one without our tables."""
    if session.scalar(text("SELECT to_regclass('alembic_version')")) is None:
        return None
    revision: str | None = session.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["database_url"] = database_url  # not an ini option: % in a password would be expanded there
    return config
