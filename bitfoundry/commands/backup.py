"""The commands `backup` and `restore`."""

from pathlib import Path
from typing import Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.options import Home, find_home


def backup(file: Annotated[Path, typer.Argument(help="The file to make.")], home: Home = None) -> None:
    """Save all data of the local service, running or stopped, in one new file.

    The file holds secret.key, which opens the stored tokens: keep it as secret as the service itself.
    """
    from bitfoundry.local.backup import SECRET_KEY, back_up

    folder = find_home(home)
    back_up(folder, file, _say)
    terminal.out.print(f"backed up {folder} to {file}", soft_wrap=True)
    if (folder / SECRET_KEY).exists():
        terminal.err.print("It holds secret.key, which opens stored tokens: keep it secret (its mode is 0600).")
    else:
        terminal.err.print("The key that opens stored tokens is not in it: keep that one, too.")


def restore(file: Annotated[Path, typer.Argument(help="A file that `backup` made.")], home: Home = None) -> None:
    """Restore a backup, checked by its hashes, to a data folder that does not exist yet."""
    from bitfoundry.local import backup

    folder = find_home(home)
    backup.restore(file, folder, _say)
    terminal.out.print(f"restored to {folder}; `bitfoundry up` runs it", soft_wrap=True)


def _say(message: str) -> None:
    terminal.err.print(f"· {message}")


COMMANDS = (backup, restore)
