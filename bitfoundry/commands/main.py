"""The command `bitfoundry`. Exit status: 0 done, 1 a failure (explained), 2 wrong usage, 130 interrupted.

Each command imports what it needs when it runs: `bitfoundry list` starts without torch, FastAPI or the engines.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.exceptions import Abort, TyperException

from bitfoundry import __version__
from bitfoundry.commands import account as account_commands
from bitfoundry.commands import backup as backup_commands
from bitfoundry.commands import datasets as dataset_commands
from bitfoundry.commands import fsck, terminal
from bitfoundry.commands import jobs as job_commands
from bitfoundry.commands import members as member_commands
from bitfoundry.commands import models as model_commands
from bitfoundry.commands import publish as publish_commands
from bitfoundry.commands import registry as registry_commands
from bitfoundry.commands import retention as retention_commands
from bitfoundry.commands import shares as share_commands
from bitfoundry.commands import webhooks as webhook_commands
from bitfoundry.commands.explain import explain
from bitfoundry.commands.explain_run import explain as explain_run
from bitfoundry.commands.headings import Commands, put_under_headings
from bitfoundry.commands.options import (
    AsJson,
    Home,
    JobId,
    Key,
    Model,
    Url,
    connect,
    connect_if_any,
    find_home,
    with_client,
)
from bitfoundry.commands.track import track
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.answers import Inspection
    from bitfoundry.client.service import Client
    from bitfoundry.local.stack import LocalStack

app = typer.Typer(
    name="bitfoundry",
    cls=Commands,
    help="Quantize language models and verify the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    # AMD Quark's flags have underscores, those of most programs dashes: every command takes both.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
sweep = typer.Typer(help="Submit many jobs at once: one per combination of values.", no_args_is_help=True)


@app.command()
def up(
    home: Home = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 chooses a free one.")] = 8765,
    models: Annotated[
        list[Path] | None, typer.Option(help="Folder that jobs may read models from. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole service on this machine, in the foreground. Ctrl-C drains and stops it; data is kept."""
    from bitfoundry.local import dashboard
    from bitfoundry.local.stack import LocalStack

    def say(message: str) -> None:
        terminal.err.print(f"· {message}")

    signal.signal(signal.SIGINT, _interrupt)  # a shell script starts its background jobs with this signal ignored
    stack = LocalStack(find_home(home), port, model_roots=models or (), shows_local_runs=True, say=say)
    with stack:
        dashboard.build_if_missing(stack.logs / "dashboard.log", say)
        try:
            _announce(stack, as_json)
            while True:
                time.sleep(1.0)
                stack.tend()
        except KeyboardInterrupt:
            terminal.err.print("· stopping: running jobs return to the queue (press Ctrl-C again to stop at once)")


@app.command()
def demo(
    home: Home = None,
    picture: Annotated[Path | None, typer.Option(help="Also save the output as an SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize a small model for a goal and with two presets on a local service, and show the verified results."""
    from bitfoundry.commands.demo import Demo

    show = Demo(home, quiet=as_json)
    ended = show.run()
    if picture:
        show.save_picture(picture)
    if as_json:
        terminal.print_json([job.model_dump(mode="json") for job in ended])
    if any(job.state != "succeeded" for job in ended):
        raise typer.Exit(1)


@app.command("install-converter")
def install_converter() -> None:
    """Download llama.cpp's converter into this Python environment, for GGUF files of most architectures (38 MB)."""
    from quantcore.export.gguf import converter

    converter.install(lambda message: terminal.err.print(f"· {message}"))


def _with_own_flags(name: str, text: str, run: Callable[[list[str]], int | None]) -> None:
    """Add a command that reads its own command line, ``--help`` included. ``run`` returns the status, None for 0."""

    def command(context: typer.Context) -> None:
        raise typer.Exit(run(context.args) or 0)

    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=text, context_settings=passed_on, add_help_option=False)(command)


def _of_engine(name: str, text: str) -> None:
    def run(arguments: list[str]) -> int:
        from bitfoundry.commands.results import find_folder
        from quantcore.cli import main as engine

        return engine.main([name, *arguments], find_folder)

    _with_own_flags(name, text, run)


def _about_a_job(name: str, text: str) -> None:
    def run(arguments: list[str]) -> int | None:
        from bitfoundry.commands import submission

        return submission.COMMANDS[name](arguments)

    _with_own_flags(name, text, run)


_about_a_job("submit", "Queue a job.")
_about_a_job("plan", "Show what a job would do, or which resources it would need, without running it.")
_about_a_job("clone", "Queue a copy of a job with some settings changed.")
_of_engine("quantize", "Quantize a model: quantize MODEL [PRESET] [-o OUT]. AMD Quark's flags work too.")
_of_engine("auto", "Quantize a model for a goal: where it will run, how large it may be, how good it must be.")
_of_engine("mix", "Choose the scheme of each layer for a target size or quality (mixed precision).")
_of_engine("convert", "Convert a quantized model, from Bitfoundry or another tool, to another format without loss.")
_of_engine("imatrix", "Write an importance matrix of a model for llama-quantize --imatrix and quantize --imatrix.")
_of_engine("conversations", "Let a chat model write conversations, to calibrate it on what it says itself.")
_of_engine("evaluate", "Evaluate a model: perplexity, divergence from the original, tasks.")
_of_engine("reference", "Write what a model predicts to a file, to measure results by it later, without the model.")
_of_engine("chat", "Chat with a quantized model and its original, side by side.")
_of_engine("speed", "Benchmark a model in a serving program: tokens per second and memory, compared with the original.")
_of_engine("selftest", "Check a device: the engine's computations on it and on the CPU, compared and timed.")
_of_engine(
    "compare", "Compare results for one model by size and quality, or measure whether one is worse than another."
)


@app.command()
def inspect(
    model: Model,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model on the Hub. [default: main]")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the properties of a model and estimates for the common presets. No weights are read.

    A model that is on this machine is read here, and without a service any one is.
    """
    is_here = Path(model).exists()
    client = None if is_here else connect_if_any(url, api_key, home)
    if client is None:
        inspection = _inspect_here(model, revision)
    else:
        with client:
            inspection = client.inspect(model, revision=revision)
    if as_json:
        terminal.print_json(inspection.model_dump(mode="json"))
    else:
        terminal.out.print(terminal.inspection_details(inspection))


def _inspect_here(model: str, revision: str | None) -> Inspection:
    from bitfoundry.client.answers import Inspection
    from quantcore.errors import QuantError
    from quantcore.hub.names import is_remote
    from quantcore.plan import inspection

    path = Path(model)
    try:
        if path.exists() or not is_remote(model):
            return Inspection.model_validate({"model": {"path": str(path)}, **inspection.inspect(path).to_dict()})
        found, sha = inspection.inspect_hub(model, revision or "main")
        return Inspection.model_validate({"model": {"id": model, "revision": sha}, **found.to_dict()})
    except QuantError as error:
        raise BitfoundryError.of(error) from error


@app.command()
def doctor(url: Url = None, api_key: Key = None, home: Home = None, as_json: AsJson = False) -> None:
    """Check this machine and the service. Each problem comes with a fix. Exit status 1 if a check fails."""
    from bitfoundry.commands.doctor import look

    findings = []
    for finding in look(find_home(home), lambda: connect(url, api_key, home)):
        findings.append(finding)
        if not as_json:
            terminal.out.print(terminal.finding_line(finding.status, finding.name, finding.detail, finding.hint))
    if as_json:
        terminal.print_json([finding.model_dump() for finding in findings])
    if any(finding.status == "failed" for finding in findings):
        raise typer.Exit(1)


@app.command()
def presets(url: Url = None, api_key: Key = None, home: Home = None, as_json: AsJson = False) -> None:
    """List the presets of the service; without a service, those that are built in."""
    from quantcore.config.presets import PRESETS
    from quantcore.config.recipes import DEFAULT_EFFORT, algorithms_text
    from quantcore.plan.catalog import describe

    client = connect_if_any(url, api_key, home)
    if client is None:
        rows: Sequence[dict[str, Any]] = [describe(preset) for preset in PRESETS.values()]
    else:
        with client:
            rows = client.presets()
    if as_json:
        terminal.print_json(rows)
        return
    for preset in rows:
        chain = algorithms_text({"algo_config": preset["recipes"][DEFAULT_EFFORT]})
        line = Text.assemble((f"{preset['name']:28}", "bold"), preset["title"], (f" ({chain})", "dim"))
        terminal.out.print(line, soft_wrap=True)


@app.command()
@with_client
def download(
    client: Client,
    job_id: JobId,
    target: Annotated[
        Path | None, typer.Argument(help="Folder for the files, or the tar file. [default: ./JOB_ID, ./JOB_ID.tar]")
    ] = None,
    tar: Annotated[bool, typer.Option("--tar", help="One tar file. It cannot be resumed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a job's artifact and verify the SHA-256 of each file. Run it again to resume."""
    if tar:
        target = client.download_tar(job_id, target or Path(f"{job_id}.tar"))
    else:
        target = client.download(job_id, target or Path(job_id))
    if as_json:
        terminal.print_json({"file" if tar else "folder": str(target.absolute())})
    else:
        terminal.out.print(f"Downloaded and verified: {target}", soft_wrap=True)


for name, command in job_commands.COMMANDS.items():
    app.command(name)(command)
for command in (*publish_commands.COMMANDS, *share_commands.COMMANDS, *backup_commands.COMMANDS):
    app.command()(command)
for name, command in job_commands.SWEEP_COMMANDS.items():
    sweep.command(name)(command)
app.add_typer(sweep, name="sweep")
app.command()(model_commands.models)
app.command("explain")(explain_run)
app.command()(track)
app.command()(account_commands.audit)
app.command()(account_commands.usage)
app.command()(fsck.fsck)
groups = account_commands.GROUPS | {
    "datasets": ("Uploaded calibration data.", dataset_commands.COMMANDS),
    "members": ("Members of the project: the people who use it, with their roles.", member_commands.COMMANDS),
    "registry": ("Model registry: versions, aliases, and who approves them.", registry_commands.COMMANDS),
    "retention": ("Data retention: which finished jobs are kept.", retention_commands.COMMANDS),
    "webhooks": ("Webhooks: notify a URL of events.", webhook_commands.COMMANDS),
}
for name, (about, commands) in groups.items():
    group = typer.Typer(help=about, no_args_is_help=True)
    for verb, command in commands.items():
        group.command(verb)(command)
    app.add_typer(group, name=name)
put_under_headings(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script and exit with its status."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit status. SIGTERM ends it in order, like Ctrl-C."""
    if arguments in (["--version"], ["version"]):
        print(f"bitfoundry {__version__}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status: Any = app(arguments, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SystemExit as end:  # of a command that reads its own flags
        return int(end.code or 0)
    except BitfoundryError as error:
        explain(error, as_json="--json" in arguments)
        return 1
    except TyperException as error:
        error.show() if hasattr(error, "show") else print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        extras = {"quantize": "engine", "chat": "engine", "selftest": "engine", "demo": "demo"}
        extra = extras.get("".join(arguments[:1]), "local")
        missing = BitfoundryError(
            f"This command needs the package {error.name}", hint=f"Install it: pip install 'bitfoundry[{extra}]'"
        )
        explain(missing, as_json="--json" in arguments)
        return 1
    except (KeyboardInterrupt, Abort):
        terminal.err.print("Interrupted.")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _announce(stack: LocalStack, as_json: bool) -> None:
    if as_json:
        links = {"url": stack.url, "dashboard": stack.dashboard_link}
        terminal.print_json(links | {"api_key": stack.api_key, "home": str(stack.home)})
    else:
        terminal.out.print(Text.assemble(("ready      ", "bold green"), stack.url))
        terminal.out.print(f"dashboard  {stack.dashboard_link}", soft_wrap=True)
        terminal.out.print(f"API key    {stack.api_key}", soft_wrap=True)
        terminal.out.print(f"data       {stack.home}   logs in {stack.logs}", soft_wrap=True)
        terminal.out.print("Press Ctrl-C to stop.")
    sys.stdout.flush()
