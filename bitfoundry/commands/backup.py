"""The commands `backup` and `restore`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.options import Home, find_home


def backup(file: Annotated[Path, typer.Argument(help="Backup file to create.")], home: Home = None) -> None:
    """Back up all data of the local service, running or stopped, to one new file.

    The file contains secret.key, which decrypts the stored tokens. Protect it like the service itself.
    """
    from bitfoundry.local.backup import SECRET_KEY, back_up

    folder = find_home(home)
    back_up(folder, file, _say)
    terminal.out.print(f"Backed up {folder} to {file}", soft_wrap=True)
    if (folder / SECRET_KEY).exists():
        terminal.err.print(
            "The file contains secret.key, which decrypts the stored tokens. Keep it secret (its mode is 0600)."
        )
    else:
        terminal.err.print(
            "The file does not contain the key that decrypts the stored tokens. Back up that key separately."
        )


def restore(
    file: Annotated[Path, typer.Argument(help="Backup file, as written by `backup`.")],
    home: Home = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="secret.key of the service that made it. [default: that of the service on this machine]"),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Restore it without a valid signature. A backup is SQL, which can run programs on this machine: "
            "use this only if nobody else could write the file.",
        ),
    ] = False,
) -> None:
    """Verify a backup and restore it to a new data folder. The service's secret key must have signed it."""
    from bitfoundry.local import backup

    folder = find_home(home)
    vault = None if trust else backup.find_vault(find_home(None), key_file)
    backup.restore(file, folder, _say, vault=vault, trusted=trust)
    chosen = "" if folder == find_home(None) else f" --home {shlex.quote(str(folder))}"
    terminal.out.print(f"Restored to {folder}. Start it with `bitfoundry up{chosen}`.", soft_wrap=True)


def _say(message: str) -> None:
    terminal.err.print(f"· {message}")


COMMANDS = (backup, restore)
