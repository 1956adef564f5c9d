"""``plan MODEL ...``: what a job would need of given hardware, from a config.json or from headers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from quantcore.checkpoint.headers import ModelHeaders, read_json
from quantcore.cli.flags import Flags, add_hardware, add_scheme
from quantcore.cli.from_flags import calibration_of, config_of_flags, exports_of
from quantcore.hub import download as hub
from quantcore.plan.capacity import Capacity, plan_for
from quantcore.plan.hardware import GB, parse_hardware
from quantcore.plan.shapes_of_config import tensors_of
from quantcore.reading.model import read_model

EXECUTORS = {
    "file_to_file": "file to file: weight after weight, no model is run (--file2file_quantization)",
    "streamed": "streamed: block after block, each rank with its share of the text",
    "streamed_fsdp": "streamed, every block in shards over the ranks (FSDP2)",
    "resident_fsdp": "the whole model in shards over the ranks (FSDP2), to run it",
}


def parser() -> argparse.ArgumentParser:
    flags = Flags(
        prog="bitfoundry plan",
        description="What a job would need: executor, memory by part, disk, time; and what would make it fit."
        " No weight is read.",
    )
    flags.add_argument("model", help="a config.json, a folder with one (and weights or not), or org/name on the Hub")
    add_hardware(flags)
    add_scheme(flags)
    flags.add_argument("--json", action="store_true", help="JSON for programs instead of tables")
    return flags


def answer(options: argparse.Namespace) -> Capacity:
    """Raises QuantError for a model that is not understood, or a job that cannot work."""
    hardware = parse_hardware(options.devices, options.nodes, options.host_memory, options.disk)
    headers = read_outline(options.model)
    return plan_for(
        hardware, config_of_flags(options), headers.config, headers.tensors, calibration=calibration_of(options),
        exports=exports_of(options), warnings=headers.warnings,
    )  # fmt: skip


def read_outline(model: str) -> ModelHeaders:
    """The tensors that the files have, or those that config.json promises where there are no files."""
    path = Path(model)
    if not path.exists() and hub.is_model_id(model):
        return hub.read_headers(model)[0]
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if has_weights or path.suffix == ".gguf":
        return read_model(path).headers
    config = read_json(path / "config.json" if path.is_dir() else path, "no_config")
    warnings: tuple[str, ...] = ("Shapes are those that config.json promises: there are no files to look into.",)
    if config.pop("quantization_config", None):
        warnings += ("The model is quantized already; it is planned as the floats that it stands for.",)
    return ModelHeaders(config, tensors_of(config), warnings)


def show(found: Capacity) -> None:
    """The answer for a person."""
    console = Console()
    verdict = "[bold green]fits[/]" if found.fits else "[bold red]does not fit[/]"
    hardware = found.hardware
    devices = f"{hardware.num_devices} x {_gb(hardware.device_bytes)}" if hardware.num_devices else "the CPU"
    nodes = f" on each of {hardware.num_nodes} nodes" if hardware.num_nodes > 1 else ""
    console.print(f"{verdict} {devices}{nodes}: {EXECUTORS[found.chosen.executor]}", highlight=False, soft_wrap=True)
    size = f"{_gb(found.size_before_bytes)} -> {_gb(found.size_after_bytes)}"
    console.print(f"{found.num_parameters / 1e9:.1f} B parameters, {found.num_layers} layers, {size}", highlight=False)
    where = "each device" if hardware.num_devices else "each process"
    tables = [
        _table(f"memory of {where}", found.chosen.parts),
        _table("to verify the result", found.verify),
        _table("host, each node", found.host),
        _table("disk", found.disk),
        _table("time", found.seconds, _time),
        _executors(found),
    ]
    console.print(Group(*tables))
    console.print(f"[dim]time assumes {found.speeds.title}, {found.speeds.read / GB:g} GB/s read,"
                  f" {found.speeds.hashing / GB:g} GB/s hashed, {found.speeds.exchange / GB:g} GB/s between ranks;"
                  " all of it is in --json[/]", highlight=False, soft_wrap=True)  # fmt: skip
    for fault in found.faults:
        console.print(f"[red]{fault}[/]", highlight=False, soft_wrap=True)
    for advice in found.advice:
        console.print(f"would fit: {advice}", highlight=False, soft_wrap=True)
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


def _executors(found: Capacity) -> Table:
    table = Table(title="other ways", title_justify="left", show_header=False, box=None, min_width=48)
    for one in found.candidates:
        table.add_row(one.executor, _gb(one.num_bytes), "fits" if one.fits else "does not fit")
    return table
