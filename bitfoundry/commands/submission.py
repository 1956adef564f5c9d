"""The commands `submit`, `plan` and `clone`, which take the flags of `quantize`.

They read their own command line, as `quantize` does, so that every flag has one spelling and one help text.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.text import Text

from bitfoundry.client.answers import Job, Plan
from bitfoundry.client.bodies import given as without_none
from bitfoundry.client.connection import NO_SERVICE
from bitfoundry.client.service import Client
from bitfoundry.commands import jobs as job_commands
from bitfoundry.commands import publish as publish_commands
from bitfoundry.commands import terminal
from bitfoundry.commands.names import find_id
from bitfoundry.commands.options import connect, connect_if_any, evaluation_of, key_value, show_job
from bitfoundry.errors import BitfoundryError
from quantcore.cli.flags import BUDGETS, add_budget, add_job
from quantcore.cli.from_flags import request_of
from quantcore.cli.goal_flags import GOAL_FLAGS, add_goal
from quantcore.cli.grammar import Flags, add_model
from quantcore.config.recipes import algorithms_text
from quantcore.config.texts import BUILTIN
from quantcore.errors import QuantError

OLDER_NAMES = {
    "-c": "--quant_scheme",
    "--config": "--quant_scheme",
    "--export": "--model_export",
    "--calibration_source": "--dataset",
    "--calibration_config": "--dataset_config",
    "--calibration_split": "--dataset_split",
    "--calibration_column": "--dataset_column",
    "--num_samples": "--num_calib_data",
    "--file2file": "--file2file_quantization",
}


PLACE = ("source", "sources", "config", "split", "revision", "column")


def submit(arguments: list[str]) -> None:
    """Queue a job; with `--wait`, wait until it has ended."""
    flags = _flags("submit", "Queue a job. An invalid job is rejected at once, with the reason.")
    _add_model(flags)
    _add_queue(flags)
    add = flags.add_argument
    add(
        "--publish",
        help="publish the result when verified: org/name on the Hub, a URL, or a JSON file with a complete target",
    )
    add("--publish_token", metavar="NAME", help="name of the Hub token to publish with (default: --hub_token)")
    add("--wait", action="store_true", help="wait until the job has ended and is published; status 1 if it failed")
    _add_job(flags)
    options, flag_names = _parse(flags, arguments)
    target = publish_commands.read_target(options.publish, options.publish_token)
    body = _request(flags, options, flag_names) | _queue_fields(options)
    with connect(options.url, options.api_key, options.home) as client:
        job = client.submit(_model_of(options), publish=target, **_with_datasets(client, body))
        if options.wait:
            job_commands.show_end(client, job, options.json)
        else:
            show_job(job, options.json)


def plan(arguments: list[str]) -> int | None:
    """Plan a job on the service. Without one, or with `--devices`, plan here. Return the exit status."""
    if any(text.partition("=")[0] == "--devices" for text in arguments):
        return _plan_here(arguments)
    flags = _flags("plan", "Show what a job would do: sizes, memory, layers. Nothing is run.")
    _add_model(flags)
    flags.add_argument(
        "--devices",
        help="plan locally, without the service, for this hardware: 8x80GB (default without a service: this machine)."
        " MODEL may then be a config.json; --nodes, --host_memory and --disk describe the hardware",
    )
    flags.add_argument(
        "--on",
        metavar="LAUNCHER",
        help="also show what a worker with BITFOUNDRY_LAUNCHER=LAUNCHER and the environment of this command would ask"
        " its scheduler for: slurm, kubernetes",
    )
    _add_job(flags)
    options, flag_names = _parse(flags, arguments)
    body = _request(flags, options, flag_names)
    from quantcore.cli import plan_command as planning

    client = connect_if_any(options.url, options.api_key, options.home)
    if client is None:
        if needs_service := sorted(flag_names - planning.parser().names):
            raise BitfoundryError(
                f"No service is configured, and --{needs_service[0]} needs one.",
                hint="Start one with `bitfoundry up`. Without that flag, the job is planned for this machine.",
                code=NO_SERVICE,
            )
        return _plan_here([*arguments, *_this_machine()])
    with client:
        job_plan = client.plan(_model_of(options), **_with_datasets(client, body))
    asked = _ask_of(options.on, body, job_plan) if options.on else None
    if options.json:
        more = {} if asked is None else {"on": {"launcher": options.on, "request": asked}}
        terminal.print_json(job_plan.model_dump(mode="json") | more)
    else:
        _show_plan(job_plan)
        if asked is not None:
            terminal.out.print(f"\non {options.on}:\n{asked}", soft_wrap=True, markup=False, highlight=False)
    return None


def _ask_of(launcher: str, body: dict[str, Any], job_plan: Plan) -> str:
    from worker import allocation

    try:
        return allocation.preview(launcher, nodes=body.get("nodes", 1), planned_bytes=job_plan.peak_memory_bytes)
    except QuantError as error:
        raise BitfoundryError.of(error) from error


def clone(arguments: list[str]) -> None:
    """Queue a copy of a job with the settings of the flags changed."""
    flags = _flags("clone", "Queue a copy of a job with some settings changed.")
    flags.add_argument("job_id", metavar="JOB", help="job to clone: its id or the start of it, its name, or `last`")
    _add_queue(flags)
    _add_job(flags)
    options, flag_names = _parse(flags, arguments)
    changes = _request(flags, options, flag_names, needs_scheme=False) | _queue_fields(options)
    with connect(options.url, options.api_key, options.home) as client:
        original = client.find(options.job_id)
        changes = _patch(original, _with_datasets(client, changes))
        copy = client.clone(original.id, changes)
    show_job(copy, options.json)
    if copy.name and options.name is None:
        terminal.err.print(
            f"· '{copy.name}' is the name of both jobs now. Give an id, or `last` while the copy is the newest job, to"
            " say which one. --name gives a copy its own name.",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


def _plan_here(arguments: list[str]) -> int:
    """Plan with the engine on this machine, for the hardware of `--devices`."""
    from quantcore.cli import main as engine

    for text in arguments:
        if text.lstrip("-").replace("-", "_").startswith(("file2file", "shard_blocks", "no_shard_blocks")):
            _flags("plan", "").error(f"--devices compares all execution modes; remove {text}")
    return engine.main(["plan", *arguments])


def _this_machine() -> list[str]:
    """Return the flags that describe this machine: its accelerators, its memory, and the disk of this folder."""
    from quantcore.plan.hardware import GB
    from quantcore.plan.this_machine import find_devices, host_memory_bytes

    sizes = [device["memory_bytes"] for device in find_devices()]
    memory = host_memory_bytes()
    disk = shutil.disk_usage(".").free
    text = f"{len(sizes)} x {min(sizes) / GB:.0f} GB" if sizes else "its CPU"
    terminal.err.print(
        f"· no service: planned for this machine, {text}, {memory / GB:.0f} GB of memory, {disk / GB:.0f} GB of disk."
        " For another: --devices 8x80GB",
        highlight=False,
    )
    devices = ["--devices", f"{len(sizes)}x{min(sizes) / GB:.3f}GB"] if sizes else []
    return [*devices, "--host_memory", f"{memory / GB:.3f}GB", "--disk", f"{disk / GB:.3f}GB"]


def _flags(name: str, description: str) -> Flags:
    usage = f"%(prog)s {'JOB' if name == 'clone' else 'MODEL'} [PRESET] [flags]"
    flags = Flags(prog=f"bitfoundry {name}", usage=usage, description=description, aliases=OLDER_NAMES)
    flags.add_argument("--adapter", type=_refuse_adapter, help=argparse.SUPPRESS)
    return flags


def _refuse_adapter(name: str) -> str:
    raise argparse.ArgumentTypeError(
        f"the service does not merge adapters. Merge it on this machine: bitfoundry quantize MODEL --adapter {name}"
    )


def _add_model(flags: Flags) -> None:
    add_model(flags, "a path on the server, or a model on the Hub: org/name")
    flags.add_argument("--revision", help="branch, tag or commit of a model on the Hub (default: main)")
    flags.add_argument("--hub_token", metavar="NAME", help="name of the project's Hub token for a private model")


def _add_queue(flags: Flags) -> None:
    add = flags.add_argument_group("queue").add_argument
    add("--name", help="name of the job")
    add("--label", action="append", metavar="KEY=VALUE", help="label of the job; repeatable")
    add("--priority", type=int, choices=range(10), metavar="0-9", help="priority; 9 runs first (default: 5)")
    add("--max_runtime_s", type=int, help="run timeout in seconds (default: none)")
    add("--max_pending_s", type=int, help="queue timeout in seconds (default: none)")


def _add_job(flags: Flags) -> None:
    add_job(flags)
    add_budget(flags, required=False)
    add_goal(flags, is_alone=False)
    flags.add_argument(
        "--evaluation",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="evaluation setting by its API name, e.g. num_prompts=0; repeatable",
    )
    add = flags.add_argument_group("service").add_argument
    add(
        "--url",
        help="address of the service (default: BITFOUNDRY_URL, the config file, or the local one started by `up`)",
    )
    add(
        "--api-key",
        "--api_key",
        dest="api_key",
        help="API key (default: BITFOUNDRY_API_KEY, the config file, or the local service's)",
    )
    add("--home", type=Path, help="data folder of the local service (default: ~/.local/share/bitfoundry)")
    add("--json", action="store_true", help="print JSON instead of text")


def _parse(flags: Flags, arguments: list[str]) -> tuple[Any, set[str]]:
    return flags.parse_args(arguments), flags.given(arguments)


def _request(flags: Flags, options: Any, flag_names: set[str], *, needs_scheme: bool = True) -> dict[str, Any]:
    """Return the job's request. Raises BitfoundryError, or exits with status 2, for flags that do not fit together."""
    has_goal = bool(flag_names & {*GOAL_FLAGS})
    budgets = flag_names & {*BUDGETS} - ({"max_size"} if has_goal else set())
    if budgets and "schemes" not in flag_names:
        flags.error(f"--{min(budgets)} needs --schemes")
    if has_goal and "schemes" in flag_names:
        flags.error("--schemes mixes schemes for one budget, and --runtime and --device let the job choose them")
    try:
        body = request_of(options, flag_names)
    except QuantError as error:
        raise BitfoundryError.of(error) from error
    if settings := evaluation_of(options.evaluation):
        body["evaluation"] = body.get("evaluation", {}) | settings
    has_scheme = {"mix", "goal"} & body.keys() or {"preset", "global_quant_config"} & body.get("config", {}).keys()
    if needs_scheme and not has_scheme:
        flags.error(
            f"choose a preset, {flags.prog} MODEL w4a16 (see `bitfoundry presets`), or a goal, --runtime and --device"
        )
    return body


def _with_datasets(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return the request with ids in place of the names of uploaded datasets. What is none stays for the service."""
    from quantcore.data.hub_dataset import ALIASES

    for part in ("calibration", "evaluation"):
        for text in (body.get(part, {}), *body.get(part, {}).get("sources", ())):
            source = text.get("source")
            if source and "/" not in source and source not in (BUILTIN, *ALIASES):
                try:
                    text["source"] = find_id(client, "dataset_id", source)
                except BitfoundryError as error:
                    if error.code != "not_found":
                        raise
    return body


def _queue_fields(options: Any) -> dict[str, Any]:
    limits = without_none(max_runtime_s=options.max_runtime_s, max_pending_s=options.max_pending_s)
    labels = dict(map(key_value, options.label)) if options.label else None
    return without_none(name=options.name, labels=labels, priority=options.priority, limits=limits or None)


def _model_of(options: Any) -> Any:
    """Return the model. With a revision or a token it is one on the Hub."""
    model = options.model_dir
    more: dict[str, str] = without_none(revision=options.revision, hub_token=options.hub_token)
    return {"id": model, **more} if more else model


def _patch(job: Job, changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``changes`` with single settings completed to whole values by those of the cloned job."""
    parts = changes.keys() & {"calibration", "evaluation"}
    algorithms_alone = changes.get("config", {}).keys() == {"algo_config"}
    if not parts and not algorithms_alone:
        return changes
    original = job.model_dump(mode="json")
    for part in parts:
        kept = original[part]
        if {"source", "sources"} & changes[part].keys():  # the place of the other text does not apply to this one
            kept = {name: value for name, value in kept.items() if name not in PLACE}
        changes[part] = kept | changes[part]
    if algorithms_alone:
        changes["config"] = original["config"] | changes["config"]
    return changes


def _show_plan(plan: Plan) -> None:
    size = f"{terminal.megabytes(plan.size_before_bytes)} → {terminal.megabytes(plan.size_after_bytes)}"
    terminal.out.print(f"{plan.model_type}: {plan.num_blocks} blocks, {plan.num_layers} layers to quantize")
    chains = plan.possible_chains
    configs = [{"algo_config": [{"name": name} for name in chain]} for chain in chains] if chains else [plan.config]
    terminal.out.print(f"algorithms: {' or '.join(map(algorithms_text, configs))}{' at first' if chains else ''}")
    terminal.out.print(f"size {size}, peak {terminal.megabytes(plan.peak_memory_bytes)}, {plan.executor}")
    if plan.time_s is not None:
        terminal.out.print(f"expected time {plan.time_s:.0f} s, from earlier jobs with this model and settings")
    elif plan.rough_time_s is not None:
        rough = "roughly, from earlier jobs with this model and preset, and other settings"
        terminal.out.print(f"expected time about {plan.rough_time_s:.0f} s: {rough}")
    if plan.experts is not None and "tokens_per_expert" in plan.experts:
        numbers = plan.experts["num_experts"], plan.experts["tokens_per_expert"]
        terminal.out.print("{} experts get {} calibration tokens each, on average".format(*numbers))
    for kept in plan.kept:
        terminal.out.print(f"kept {kept.name}: {kept.reason}", soft_wrap=True)
    for warning in plan.warnings:
        terminal.out.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {"submit": submit, "plan": plan, "clone": clone}
