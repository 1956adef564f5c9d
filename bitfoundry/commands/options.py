"""What the commands share: their options, the way to the service, and how a job is shown."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from bitfoundry.client.answers import Job
from bitfoundry.client.bodies import given
from bitfoundry.client.connection import Connection
from bitfoundry.client.service import Client
from bitfoundry.client.user_config import UserConfig
from bitfoundry.commands import terminal
from bitfoundry.errors import BitfoundryError
from bitfoundry.local.folders import default_home

Home = Annotated[Path | None, typer.Option(help="The data folder. [default: ~/.local/share/bitfoundry]")]
Url = Annotated[str | None, typer.Option(envvar="BITFOUNDRY_URL", help="The service. [default: the one of `up` here]")]
Key = Annotated[str | None, typer.Option(envvar="BITFOUNDRY_API_KEY", help="Its API key. [default: as for --url]")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]
JobId = Annotated[str, typer.Argument(help="The job's id, as `jobs` lists it.")]
Model = Annotated[str, typer.Argument(help="A model folder on the service's machine, or a Hub id org/name.")]
Preset = Annotated[str, typer.Option("--config", "-c", help="A preset's name, or a JSON file with a whole config.")]
ConfigBesideMix = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", help="A preset's name, or a JSON file with a whole config; with --schemes one of algorithms."
    ),
]
Schemes = Annotated[
    str | None,
    typer.Option(
        help="Choose the scheme of each layer when the job runs, among these presets, as w4a16,int8_weight_only; 'keep'"
        " leaves a layer as it is. With one of the three budgets:"
    ),
]
MaxSize = Annotated[str | None, typer.Option("--max_size", help="Of all weights, as 90MB: the best mix of that size.")]
MaxBits = Annotated[
    float | None, typer.Option("--max_bits", help="A weight in the layers that are mixed, with scales: as 4.5.")
]
MaxDivergence = Annotated[
    float | None,
    typer.Option("--max_divergence", help="Mean KL in nats a token: the smallest mix as good as that."),
]
Export = Annotated[list[str] | None, typer.Option(help="A checkpoint format to write; repeat for several.")]
Samples = Annotated[int | None, typer.Option(help="Calibration samples.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens of a calibration sample.")]
Source = Annotated[
    str | None, typer.Option(help="Calibration text: builtin, a file, an uploaded dataset's id, or one on the Hub.")
]
DatasetConfig = Annotated[str | None, typer.Option(help="The config of a dataset on the Hub.")]
Split = Annotated[str | None, typer.Option(help="The split of a dataset on the Hub. [default: train]")]
Column = Annotated[str | None, typer.Option(help="Where its text is, or the chat. [default: text, else messages]")]
File2File = Annotated[
    bool | None, typer.Option("--file2file", help="Weights go from file to file: no model is run, nor measured.")
]
ShardBlocks = Annotated[
    bool | None,
    typer.Option(help="A worker of several processes holds each block in slices. [default: where memory is short]"),
]
Evaluation = Annotated[
    list[str] | None,
    typer.Option(
        help="How the result is measured: num_windows=64, seq_len=2048, source=wikitext, split=test, num_prompts=0,"
        " tasks=gsm8k,piqa, limit=100 and the like; repeatable."
    ),
]
HubToken = Annotated[
    str | None, typer.Option(help="The name of a Hub token of the project (`hub-tokens put`), for a private model.")
]
Labels = Annotated[list[str] | None, typer.Option("--label", help="key=value; repeatable.")]
Priority = Annotated[int | None, typer.Option(min=0, max=9, help="9 goes first. [default: 5]")]


def connect(url: str | None, api_key: str | None, home: Path | None) -> Client:
    """From the options, the environment, the config file, or what `bitfoundry up` left in its home."""
    config = UserConfig.read()
    url = url or config.url
    api_key = api_key or (config.api_key if url == config.url else None)  # never to another service than its own
    local = Connection.read(find_home(home))
    if not url and not local:
        raise BitfoundryError(
            "no service is known here", hint="start one with `bitfoundry up`, or give --url and --api-key"
        )
    chosen = url or (local.url if local else "")
    key = api_key or (local.api_key if local and chosen == local.url else "")
    if not key:
        raise BitfoundryError(f"{chosen} needs an API key", hint="give --api-key or set BITFOUNDRY_API_KEY")
    return Client(chosen, key)


def find_home(home: Path | None) -> Path:
    """The local stack's: of the option, the environment, the config file, or the usual one."""
    chosen = home or (None if os.environ.get("BITFOUNDRY_HOME") else UserConfig.read().home) or default_home()
    return chosen.expanduser().absolute()


def key_value(text: str) -> tuple[str, str]:
    """'key=value' -> (key, value)."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise typer.BadParameter(f"{text!r} is not key=value")
    return key, value


def mix_of(
    schemes: str | None, max_size: str | None, max_bits: float | None, max_divergence: float | None
) -> dict[str, Any] | None:
    """The job's field; the service checks the rest."""
    budget = given(max_size=max_size, max_bits=max_bits, max_divergence=max_divergence)
    if schemes is None:
        if budget:
            raise typer.BadParameter(f"--{next(iter(budget))} goes with --schemes")
        return None
    return {"schemes": [name.strip() for name in schemes.split(",")], **budget}


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
