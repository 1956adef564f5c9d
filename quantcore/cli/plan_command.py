"""``plan MODEL ...``: the resources that a job would need on given hardware, from a config.json or from headers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from quantcore.checkpoint.headers import ModelHeaders, read_json
from quantcore.cli.flags import add_hardware, add_scheme
from quantcore.cli.from_flags import calibration_of, config_of_flags, exports_of
from quantcore.cli.grammar import Flags, add_model
from quantcore.config.job_spec import JobSpec
from quantcore.hub import download as hub
from quantcore.hub.names import find_local, is_remote
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import read_model
from quantcore.plan.capacity import Capacity, plan_for
from quantcore.plan.hardware import GB, parse_hardware
from quantcore.plan.job import text_with_model_defaults
from quantcore.plan.shapes_of_config import tensors_of

EXECUTORS = {
    "file_to_file": "file to file, one weight at a time; the model is not run (--file2file_quantization)",
    "streamed": "streamed, block by block; calibration samples are divided among the ranks",
    "streamed_fsdp": "streamed, block by block; each block is sharded over the ranks (FSDP2)",
    "resident_fsdp": "whole model, sharded over the ranks (FSDP2)",
}


def parser() -> Flags:
    flags = Flags(
        prog="bitfoundry plan",
        usage="%(prog)s MODEL [PRESET] [--devices DEVICES] [flags]",
        description="Show which resources a job would need: executor, memory, disk, time; and what would make it fit."
        " Of the weights a few rows are read.",
    )
    add_model(flags, "config.json, folder with one (weights are optional), or org/name on the Hub")
    add_hardware(flags)
    add_scheme(flags)
    flags.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return flags


def answer(options: argparse.Namespace) -> Capacity:
    """Plan the job of the flags. Raises QuantError for a model that is not understood, or a job that cannot work."""
    hardware = parse_hardware(options.devices, options.nodes, options.host_memory, options.disk)
    headers = read_outline(options.model_dir)
    spec = JobSpec(
        config=config_of_flags(options),
        calibration=text_with_model_defaults(calibration_of(options), headers.config),
        export=exports_of(options),
    )
    return plan_for(hardware, spec, headers)


def read_outline(model: str) -> ModelHeaders:
    """Read the headers of the weight files; without files, derive the tensors from config.json."""
    path = Path(model)
    if not path.exists() and is_remote(model):
        return hub.read_headers(model)[0]
    find_local(model)
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if has_weights or path.suffix == ".gguf":
        return with_grids(read_model(path)).headers
    config = read_json(path / "config.json" if path.is_dir() else path, "no_config")
    warnings: tuple[str, ...] = ("Shapes were derived from config.json, because there are no weight files.",)
    if config.pop("quantization_config", None):
        warnings += ("The model is already quantized; the plan is for its dequantized weights.",)
    return ModelHeaders(config, tensors_of(config), warnings)


def show(found: Capacity) -> None:
    """Print the plan for a person."""
    console = Console()
    verdict = "[bold green]fits[/]" if found.fits else "[bold red]does not fit[/]"
    hardware = found.hardware
    devices = f"{hardware.num_devices} x {_gb(hardware.device_bytes)}" if hardware.num_devices else "the CPU"
    nodes = f" on each of {hardware.num_nodes} nodes" if hardware.num_nodes > 1 else ""
    console.print(f"{verdict} {devices}{nodes}: {EXECUTORS[found.chosen.executor]}", highlight=False, soft_wrap=True)
    size = f"{_gb(found.size_before_bytes)} -> {_gb(found.size_after_bytes)}"
    console.print(f"{found.num_parameters / 1e9:.1f} B parameters, {found.num_layers} layers, {size}", highlight=False)
    where = "device" if hardware.num_devices else "process"
    tables = [
        _table(f"memory per {where}", found.chosen.parts),
        _table("verification", found.verify),
        _table("host memory per node", found.host),
        _table("disk", found.disk),
        _table("time", found.seconds, _time),
        _executors(found),
    ]
    console.print(Group(*tables))
    console.print(
        f"[dim]Time assumes {found.speeds.title}, {found.speeds.read / GB:g} GB/s read,"
        f" {found.speeds.hashing / GB:g} GB/s hashed, {found.speeds.exchange / GB:g} GB/s between ranks;"
        " details: --json[/]",
        highlight=False,
        soft_wrap=True,
    )
    for fault in found.faults:
        console.print(f"[red]{fault}[/]", highlight=False, soft_wrap=True)
    for advice in found.advice:
        console.print(f"Would fit: {advice}", highlight=False, soft_wrap=True)
    for warning in found.plan.warnings:
        console.print(f"[yellow]warning[/] {warning}", highlight=False, soft_wrap=True)


def show_json(found: Capacity) -> None:
    print(json.dumps(found.to_dict(), indent=2))


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _table(title: str, parts: Mapping[str, float], form: Any = _gb) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, min_width=48)
    table.add_column()
    table.add_column(justify="right")
    for name, value in parts.items():
        if value:
            table.add_row(name.replace("_", " "), form(value))
    table.add_row("[bold]total[/]", f"[bold]{form(sum(parts.values()))}[/]")
    return table


def _executors(capacity: Capacity) -> Table:
    table = Table(title="executors", title_justify="left", show_header=False, box=None, min_width=48)
    for candidate in capacity.candidates:
        table.add_row(candidate.executor, _gb(candidate.num_bytes), "fits" if candidate.fits else "does not fit")
    return table
