"""Shared parts of the commands: options, the connection to the service, and the output of a job."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate
from urllib.parse import urlsplit

import typer

from bitfoundry.client.connection import NO_SERVICE, Connection
from bitfoundry.client.connection import find_home as find_home
from bitfoundry.commands import terminal
from bitfoundry.commands.names import LISTS, find_id
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.answers import Job
    from bitfoundry.client.service import Client

Home = Annotated[
    Path | None, typer.Option(help="Data folder of the local service. [default: ~/.local/share/bitfoundry]")
]
Url = Annotated[
    str | None,
    typer.Option(envvar="BITFOUNDRY_URL", help="Address of the service. [default: the local one started by `up`]"),
]
Key = Annotated[str | None, typer.Option(envvar="BITFOUNDRY_API_KEY", help="API key. [default: the local service's]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JobId = Annotated[
    str, typer.Argument(help="Job: its id or the start of it, its name, `last` for the newest, or a MODEL@ALIAS.")
]
ResultName = Annotated[
    str, typer.Argument(help="Job or local run: its id or the start of it, its name, its folder, or `last`.")
]
Model = Annotated[str, typer.Argument(help="Path on the server, or a model on the Hub: org/name.")]
HubToken = Annotated[
    str | None, typer.Option(help="Name of the project's Hub token for a private model (see `hub-tokens put`).")
]
Labels = Annotated[list[str] | None, typer.Option("--label", help="Label, as key=value. Repeatable.")]
Priority = Annotated[int | None, typer.Option(min=0, max=9, help="Priority; 9 runs first. [default: 5]")]


def connect(url: str | None, api_key: str | None, home: Path | None) -> Client:
    """Connect to the service of the options, or to the one that `Connection.find` finds."""
    connection = Connection.find(url, api_key, home)
    from bitfoundry.client.service import Client

    return Client(connection.url, connection.api_key)


def connect_if_any(url: str | None, api_key: str | None, home: Path | None) -> Client | None:
    """Connect as ``connect`` does, for commands that work without a service.

    None if none is configured, or if the one that `bitfoundry up` started here has been stopped, which is said.
    """
    try:
        connection = Connection.find(url, api_key, home)
    except BitfoundryError as error:
        if error.code != NO_SERVICE:
            raise
        return None
    if url is None and connection == Connection.read(find_home(home)) and not _listens(connection.url):
        terminal.err.print("· the service of `bitfoundry up` is stopped: this is what there is without it")
        return None
    return connect(url, api_key, home)


def _listens(url: str) -> bool:
    """Return whether a program accepts connections at this address of this machine."""
    from quantcore.config.time_limits import LOCAL_S  # whose package loads the presets: only where it is needed

    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=LOCAL_S).close()
    except OSError:
        return False
    return True


def with_client(command: Callable[Concatenate[Client, ...], None]) -> Callable[..., None]:
    """Give a command a connected client as its first argument, and the options that choose its service before --json.

    Ids may be given in any way that ``find_id`` takes. Typer reads both the signature and the annotations.
    """

    @wraps(command, assigned=("__module__", "__name__", "__doc__"))  # its annotations are not ours
    def connected(*, url: Url = None, api_key: Key = None, home: Home = None, **arguments: Any) -> None:
        with connect(url, api_key, home) as client:
            for name in arguments.keys() & {"job_id", *LISTS}:
                arguments[name] = find_id(client, name, arguments[name])
            command(client, **arguments)

    _, *own, as_json = inspect.signature(command, eval_str=True, locals={"Client": object}).parameters.values()
    *connection, _ = inspect.signature(
        connected, follow_wrapped=False, eval_str=True, globals=globals()
    ).parameters.values()
    shown = [*own, *(parameter.replace(kind=as_json.kind) for parameter in connection), as_json]
    connected.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    connected.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return connected


def key_value(text: str) -> tuple[str, str]:
    """Split 'key=value' into (key, value)."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise typer.BadParameter(f"{text!r} is not of the form key=value")
    return key, value


NAMES = ("tasks", "kv_cache_dtypes")
"""Settings of an evaluation that hold several names."""


def evaluation_of(settings: list[str] | None) -> dict[str, Any] | None:
    """Parse ['num_windows=64', 'tasks=gsm8k,piqa'] into {"num_windows": 64, "tasks": ["gsm8k", "piqa"]}.

    The service checks names and values."""
    if settings is None:
        return None
    evaluation: dict[str, Any] = {}
    for name, value in map(key_value, settings):
        number = int(value) if value.isdecimal() else value
        evaluation[name] = value.split(",") if name in NAMES else number
    return evaluation


def read_config(text: str) -> str | dict[str, Any]:
    """Return a preset's name unchanged, or the content of a .json file."""
    if not text.endswith(".json"):
        return text
    try:
        content = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BitfoundryError(f"Cannot read {text} as a config: {error}") from error
    if not isinstance(content, dict):
        raise BitfoundryError(f"{text} does not contain a JSON object")
    return content


def show_job(job: Job, as_json: bool) -> None:
    """Print a job as text or JSON."""
    if as_json:
        terminal.print_json(job.model_dump(mode="json"))
    else:
        terminal.out.print(terminal.job_details(job))


def show_deleted(name: str, as_json: bool) -> None:
    """Print that ``name`` was deleted, as text or JSON."""
    if as_json:
        terminal.print_json({"deleted": name})
    else:
        terminal.out.print(f"Deleted {name}")
