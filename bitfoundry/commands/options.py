"""What the commands share: their options, the way to the service, and how a job is shown."""

import inspect
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate

import typer

from bitfoundry.client.answers import Job
from bitfoundry.client.connection import Connection
from bitfoundry.client.connection import find_home as find_home
from bitfoundry.client.service import Client
from bitfoundry.commands import terminal
from bitfoundry.errors import BitfoundryError

Home = Annotated[Path | None, typer.Option(help="The data folder. [default: ~/.local/share/bitfoundry]")]
Url = Annotated[str | None, typer.Option(envvar="BITFOUNDRY_URL", help="The service. [default: the one of `up` here]")]
Key = Annotated[str | None, typer.Option(envvar="BITFOUNDRY_API_KEY", help="Its API key. [default: as for --url]")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]
JobId = Annotated[str, typer.Argument(help="The job's id, as `jobs` lists it.")]
Model = Annotated[str, typer.Argument(help="A model folder on the service's machine, or a Hub id org/name.")]
HubToken = Annotated[
    str | None, typer.Option(help="The name of a Hub token of the project (`hub-tokens put`), for a private model.")
]
Labels = Annotated[list[str] | None, typer.Option("--label", help="key=value; repeatable.")]
Priority = Annotated[int | None, typer.Option(min=0, max=9, help="9 goes first. [default: 5]")]


def connect(url: str | None, api_key: str | None, home: Path | None) -> Client:
    """The service of the options, or the one that `Connection.find` finds."""
    found = Connection.find(url, api_key, home)
    return Client(found.url, found.api_key)


def with_client(command: Callable[Concatenate[Client, ...], None]) -> Callable[..., None]:
    """Give a command a connected client as its first argument, and the options that choose its service before --json.

    Typer reads both the signature and the annotations.
    """

    @wraps(command, assigned=("__module__", "__name__", "__doc__"))  # its annotations are not ours
    def connected(*, url: Url = None, api_key: Key = None, home: Home = None, **arguments: Any) -> None:
        with connect(url, api_key, home) as client:
            command(client, **arguments)

    _, *own, as_json = inspect.signature(command).parameters.values()
    *connection, _ = inspect.signature(connected, follow_wrapped=False).parameters.values()
    shown = [*own, *(each.replace(kind=as_json.kind) for each in connection), as_json]
    connected.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    connected.__annotations__ = {each.name: each.annotation for each in shown}
    return connected


def key_value(text: str) -> tuple[str, str]:
    """'key=value' -> (key, value)."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise typer.BadParameter(f"{text!r} is not key=value")
    return key, value


def evaluation_of(settings: list[str] | None) -> dict[str, Any] | None:
    """['num_windows=64', 'tasks=gsm8k,piqa'] -> {"num_windows": 64, "tasks": ["gsm8k", "piqa"]}; the service checks."""
    if settings is None:
        return None
    found: dict[str, Any] = {}
    for name, value in map(key_value, settings):
        number = int(value) if value.isdecimal() else value
        found[name] = value.split(",") if name == "tasks" else number
    return found


def read_config(text: str) -> str | dict[str, Any]:
    """A preset's name as it is; the content of a .json file."""
    if not text.endswith(".json"):
        return text
    try:
        content = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BitfoundryError(f"{text} cannot be read as a config: {error}") from error
    if not isinstance(content, dict):
        raise BitfoundryError(f"{text} holds no JSON object")
    return content


def show_job(job: Job, as_json: bool) -> None:
    """One job, for people or for programs."""
    if as_json:
        terminal.print_json(job.model_dump(mode="json"))
    else:
        terminal.out.print(terminal.job_details(job))


def show_deleted(name: str, as_json: bool) -> None:
    """That something is gone, for people or for programs."""
    if as_json:
        terminal.print_json({"deleted": name})
    else:
        terminal.out.print(f"{name} is deleted")
