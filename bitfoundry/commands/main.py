"""The command `bitfoundry`. Exit status: 0 done, 1 a failure (explained), 2 wrong usage, 130 interrupted.

Each command imports what it needs when it runs: `bitfoundry list` starts without torch, FastAPI or the engines.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.exceptions import Abort, TyperException

from bitfoundry import __version__
from bitfoundry.client.bodies import given
from bitfoundry.commands import account as account_commands
from bitfoundry.commands import backup as backup_commands
from bitfoundry.commands import datasets as dataset_commands
from bitfoundry.commands import fsck, terminal
from bitfoundry.commands import jobs as job_commands
from bitfoundry.commands import publish as publish_commands
from bitfoundry.commands import retention as retention_commands
from bitfoundry.commands import webhooks as webhook_commands
from bitfoundry.commands.options import (
    AsJson,
    Column,
    ConfigBesideMix,
    DatasetConfig,
    Evaluation,
    Export,
    File2File,
    Home,
    HubToken,
    JobId,
    Key,
    Labels,
    MaxBits,
    MaxDivergence,
    MaxSize,
    Model,
    Priority,
    Samples,
    Schemes,
    SeqLen,
    ShardBlocks,
    Source,
    Split,
    Url,
    connect,
    evaluation_of,
    find_home,
    key_value,
    mix_of,
    read_config,
    show_job,
)
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.local.stack import LocalStack

app = typer.Typer(
    name="bitfoundry",
    help="Quantize language models, and prove the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
sweep = typer.Typer(help="Many jobs at once: every combination of a matrix of values.", no_args_is_help=True)


@app.command()
def up(
    home: Home = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 8765,
    models: Annotated[
        list[Path] | None, typer.Option(help="A folder that jobs may read models from; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole service here, in the foreground. Ctrl-C drains and stops it; the data stays."""
    from bitfoundry.local import dashboard
    from bitfoundry.local.stack import LocalStack

    def say(message: str) -> None:
        terminal.err.print(f"· {message}")

    signal.signal(signal.SIGINT, _interrupt)  # a script's shell lets what it runs with & ignore it
    stack = LocalStack(find_home(home), port, model_roots=models or (), say=say)
    with stack:
        dashboard.build_if_missing(stack.logs / "dashboard.log", say)
        try:
            _announce(stack, as_json)
            while True:
                time.sleep(1.0)
                stack.tend()
        except KeyboardInterrupt:
            terminal.err.print("· stopping: running jobs go back to the queue (Ctrl-C again hurries)")


@app.command()
def demo(
    home: Home = None,
    picture: Annotated[Path | None, typer.Option(help="Also save what was shown as an SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize a real small model three ways on the real stack, and show the proof."""
    from bitfoundry.commands.demo import Demo

    show = Demo(home, quiet=as_json)
    ended = show.run()
    if picture:
        show.save_picture(picture)
    if as_json:
        terminal.print_json([job.model_dump(mode="json") for job in ended])
    if any(job.state != "succeeded" for job in ended):
        raise typer.Exit(1)


def _of_engine(name: str, text: str) -> None:
    """A command that the engine's own command line reads, its ``--help`` included."""

    def command(context: typer.Context) -> None:
        from quantcore.cli import main as engine

        raise typer.Exit(engine.main([*([] if name == "quantize" else [name]), *context.args]))

    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=f"{text}; see `{name} --help`.", context_settings=passed_on, add_help_option=False)(command)


_of_engine("quantize", "Quantize here and now, without any service, with the flags of AMD Quark's script")
_of_engine("mix", "Choose the scheme of each layer for a size or a quality, from what its rounding costs")
_of_engine("convert", "Take a quantized model, by Bitfoundry or by others, into another format without loss")
_of_engine("evaluate", "Measure a model that is there: perplexity, distance from its original, tasks")
_of_engine("speed", "Time a program that serves a model: tokens a second, memory, beside the original")
_of_engine("compare", "Results of one model side by side: size against quality, and which no other one beats")


@app.command()
def submit(
    model: Model,
    config: ConfigBesideMix = None,
    schemes: Schemes = None,
    max_size: MaxSize = None,
    max_bits: MaxBits = None,
    max_divergence: MaxDivergence = None,
    export: Export = None,
    calibration_source: Source = None,
    calibration_config: DatasetConfig = None,
    calibration_split: Split = None,
    calibration_column: Column = None,
    num_samples: Samples = None,
    seq_len: SeqLen = None,
    name: Annotated[str | None, typer.Option(help="A name to find the job by.")] = None,
    label: Labels = None,
    priority: Priority = None,
    max_runtime_s: Annotated[int | None, typer.Option(min=1, help="Give up after running for so long.")] = None,
    max_pending_s: Annotated[int | None, typer.Option(min=1, help="Give up after waiting for so long.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Of each file of weights, as 500MB.")] = None,
    gate: Annotated[str | None, typer.Option(help="What a missed limit means: off, warn or fail.")] = None,
    evaluation: Evaluation = None,
    file2file: File2File = None,
    shard_blocks: ShardBlocks = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Workers that do it together; they must share a disk. [default: 1]"),
    ] = None,
    hub_token: HubToken = None,
    publish: Annotated[
        str | None,
        typer.Option(help="Where the result shall go: org/name on the Hub, a URL, or a JSON file with a whole target."),
    ] = None,
    publish_token: Annotated[
        str | None, typer.Option(help="The name of the Hub token to publish with. [default: --hub-token]")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay until it has ended and is published; status 1 if it did not succeed."),
    ] = False,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Queue a job. A job that cannot work is refused at once, with the reason."""
    labels = dict(key_value(each) for each in label) if label else None
    with connect(url, api_key, home) as client:
        job = client.submit(
            _with_token(model, hub_token),
            config=read_config(config) if config else None,
            mix=mix_of(schemes, max_size, max_bits, max_divergence),
            export=export,
            calibration=given(
                source=calibration_source,
                config=calibration_config,
                split=calibration_split,
                column=calibration_column,
                num_samples=num_samples,
                seq_len=seq_len,
            )
            or None,
            name=name,
            labels=labels,
            priority=priority,
            limits=given(max_runtime_s=max_runtime_s, max_pending_s=max_pending_s) or None,
            max_shard_size=max_shard_size,
            gate=gate,
            evaluation=evaluation_of(evaluation),
            file2file=file2file,
            shard_blocks=shard_blocks,
            nodes=nodes,
            publish=publish_commands.read_target(publish, publish_token),
        )
        if wait:
            job_commands.show_end(client, job, as_json)
        else:
            show_job(job, as_json)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def plan(
    context: typer.Context,
    model: Model,
    config: ConfigBesideMix = None,
    schemes: Schemes = None,
    max_size: MaxSize = None,
    max_bits: MaxBits = None,
    max_divergence: MaxDivergence = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Plan here, without the service, for such hardware: 8x80GB. Then MODEL may be a config.json, and the"
            " other flags are those of `quantize`, with --nodes, --host_memory and --disk."
        ),
    ] = None,
    export: Export = None,
    calibration_source: Source = None,
    calibration_config: DatasetConfig = None,
    calibration_split: Split = None,
    calibration_column: Column = None,
    num_samples: Samples = None,
    seq_len: SeqLen = None,
    file2file: File2File = None,
    shard_blocks: ShardBlocks = None,
    hub_token: HubToken = None,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """What a job would do with this model: sizes, memory, layers. Nothing is done.

    With --devices: executor, memory of each device, disk and time on that hardware, and what would make it fit.
    """
    if devices is not None:
        if file2file or shard_blocks:
            raise typer.BadParameter("with --devices every way is looked at: leave --file2file and --shard-blocks out")
        raise typer.Exit(_plan_here(context.args, model, devices, as_json))
    if context.args:
        raise typer.BadParameter(f"{context.args[0]} goes with --devices, for a plan without the service")
    mix = mix_of(schemes, max_size, max_bits, max_divergence)
    if config is None and mix is None:
        raise typer.BadParameter("give --config: a preset's name, or a JSON file with a whole config; or --schemes")
    calibration = given(
        source=calibration_source,
        config=calibration_config,
        split=calibration_split,
        column=calibration_column,
        num_samples=num_samples,
        seq_len=seq_len,
    )
    asked = _with_token(model, hub_token)
    with connect(url, api_key, home) as client:
        found = client.plan(
            asked, config=read_config(config) if config else None, mix=mix, export=export,
            calibration=calibration or None,
            file2file=file2file, shard_blocks=shard_blocks,
        )  # fmt: skip
    if as_json:
        terminal.print_json(found)
        return
    size = f"{terminal.megabytes(found['size_before_bytes'])} → {terminal.megabytes(found['size_after_bytes'])}"
    terminal.out.print(f"{found['model_type']}: {found['num_blocks']} blocks, {found['num_layers']} layers to quantize")
    terminal.out.print(f"size {size}, peak {terminal.megabytes(found['peak_memory_bytes'])}, {found['executor']}")
    for kept in found["kept"]:
        terminal.out.print(f"kept {kept['name']}: {kept['reason']}", soft_wrap=True)
    for warning in found["warnings"]:
        terminal.out.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)


@app.command()
def inspect(
    model: Model,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """What a model is, and what the usual presets would make of it. No weight is read."""
    with connect(url, api_key, home) as client:
        found = client.inspect(model, revision=revision)
    if as_json:
        terminal.print_json(found.model_dump(mode="json"))
    else:
        terminal.out.print(terminal.inspection_details(found))


@app.command()
def doctor(url: Url = None, api_key: Key = None, home: Home = None, as_json: AsJson = False) -> None:
    """Look at this machine and at the service, and say what to do about what is amiss. Status 1 if something fails."""
    from bitfoundry.commands.doctor import look

    found = []
    for finding in look(find_home(home), lambda: connect(url, api_key, home)):
        found.append(finding)
        if not as_json:
            terminal.out.print(terminal.finding_line(finding.status, finding.name, finding.detail, finding.hint))
    if as_json:
        terminal.print_json([finding.model_dump() for finding in found])
    if any(finding.status == "failed" for finding in found):
        raise typer.Exit(1)


@app.command()
def presets(url: Url = None, api_key: Key = None, home: Home = None, as_json: AsJson = False) -> None:
    """List the named configs of the service."""
    with connect(url, api_key, home) as client:
        found = client.presets()
    if as_json:
        terminal.print_json(found)
        return
    for preset in found:
        calibrated = " (needs calibration)" if preset.get("needs_calibration") else ""
        line = Text.assemble((f"{preset['name']:28}", "bold"), preset["title"], (calibrated, "dim"))
        terminal.out.print(line, soft_wrap=True)


@app.command()
def download(
    job_id: JobId,
    folder: Annotated[Path | None, typer.Argument(help="Where to put the files. [default: ./JOB_ID]")] = None,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a job's artifact, each file checked against its SHA-256. Run it again to go on where it stopped."""
    with connect(url, api_key, home) as client:
        target = client.download(job_id, folder or Path(job_id))
    if as_json:
        terminal.print_json({"folder": str(target.absolute())})
    else:
        terminal.out.print(f"the artifact is whole in {target}", soft_wrap=True)


for name, command in job_commands.COMMANDS.items():
    app.command(name)(command)
for command in (*publish_commands.COMMANDS, *backup_commands.COMMANDS):
    app.command()(command)
for name, command in job_commands.SWEEP_COMMANDS.items():
    sweep.command(name)(command)
app.add_typer(sweep, name="sweep")
app.command()(account_commands.audit)
app.command()(account_commands.usage)
app.command()(fsck.fsck)
groups = account_commands.GROUPS | {
    "datasets": ("Calibration text that the service keeps.", dataset_commands.COMMANDS),
    "retention": ("What the project keeps of its jobs.", retention_commands.COMMANDS),
    "webhooks": ("Addresses that are told of events.", webhook_commands.COMMANDS),
}
for name, (about, commands) in groups.items():
    group = typer.Typer(help=about, no_args_is_help=True)
    for verb, command in commands.items():
        group.command(verb)(command)
    app.add_typer(group, name=name)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(given))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status. SIGTERM ends it as Ctrl-C does: in order."""
    if arguments in (["--version"], ["version"]):
        print(f"bitfoundry {__version__}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status: Any = app(arguments, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except BitfoundryError as error:
        terminal.explain(error, as_json="--json" in arguments)
        return 1
    except TyperException as error:
        error.show() if hasattr(error, "show") else print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        extra = "engine" if "quantize" in arguments[:1] else "demo" if "demo" in arguments[:1] else "local"
        missing = BitfoundryError(f"this needs {error.name}", hint=f"pip install 'bitfoundry[{extra}]'")
        terminal.explain(missing, as_json="--json" in arguments)
        return 1
    except (KeyboardInterrupt, Abort):
        terminal.err.print("interrupted")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _plan_here(flags: list[str], model: str, devices: str, as_json: bool) -> int:
    """The engine's own plan."""
    from quantcore.cli import main as engine

    return engine.main(["plan", model, "--devices", devices, *flags, *(["--json"] if as_json else [])])


def _announce(stack: "LocalStack", as_json: bool) -> None:
    if as_json:
        links = {"url": stack.url, "dashboard": stack.dashboard_link}
        terminal.print_json(links | {"api_key": stack.api_key, "home": str(stack.home)})
    else:
        terminal.out.print(Text.assemble(("ready      ", "bold green"), stack.url))
        terminal.out.print(f"dashboard  {stack.dashboard_link}", soft_wrap=True)
        terminal.out.print(f"API key    {stack.api_key}", soft_wrap=True)
        terminal.out.print(f"data       {stack.home}   logs in {stack.logs}", soft_wrap=True)
        terminal.out.print("Ctrl-C stops it.")
    sys.stdout.flush()


def _with_token(model: str, hub_token: str | None) -> str | dict[str, str]:
    """A model that only the token of that name opens is one on the Hub."""
    return model if hub_token is None else {"id": model, "hub_token": hub_token}
