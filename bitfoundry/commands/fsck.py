"""`bitfoundry fsck`: compares the files in the service's data folder with those that its database names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bitfoundry.commands.options import AsJson, Home, find_home
from bitfoundry.errors import StackError


def fsck(
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Remove files that are older than a day and not referenced by the database."),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Check all files of the local service, running or not, for missing, damaged and unreferenced ones."""
    folder = find_home(home)
    if not folder.is_dir():
        raise StackError(
            f"Data folder {folder} does not exist", hint="Specify it with --home, or run `bitfoundry up` once"
        )
    flags = [*(["--repair"] if repair else []), *(["--json"] if as_json else [])]
    with _database(folder) as database_url:
        ours = {"DATABASE_URL": database_url, "BITFOUNDRY_DATA_DIR": str(folder)}
        unused = {"BROKER_URL": "redis+socket:///nowhere"}
        command = [sys.executable, "-m", "api", "fsck", *flags]
        status = subprocess.run(command, env=unused | os.environ | ours, cwd=folder).returncode
    raise typer.Exit(status)


@contextmanager
def _database(home: Path) -> Iterator[str]:
    """Yield the database's URL: of the environment, of the running service, or of a server started for the command."""
    from bitfoundry.local.postgres import DATABASE, SUPERUSER, Postgres  # here: they need the extra `local`

    if configured := os.environ.get("DATABASE_URL"):
        yield configured
        return
    server = Postgres(home)
    try:
        url = server.start()
    except StackError as error:
        sockets = _sockets_of_running(server.data)
        if sockets is None:
            raise error
        yield f"postgresql+psycopg://{SUPERUSER}@/{DATABASE}?host={sockets}"
        return
    try:
        yield url
    finally:
        server.stop()


def _sockets_of_running(data: Path) -> str | None:
    """Return the folder of the server's socket, which line 5 of its pid file names."""
    try:
        return (data / "postmaster.pid").read_text().splitlines()[4] or None
    except (OSError, IndexError):
        return None
