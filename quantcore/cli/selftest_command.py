"""``selftest``: what the engine computes on a device beside what it computes on the CPU, as a table and as a report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from quantcore.cli.flags import new_file
from quantcore.cli.grammar import Flags
from quantcore.engine.selftest.values import Check, Selftest, Speed
from quantcore.events import Emit

MAX_SHOWN = 8
"""Number of checks that are not as they should be which are shown one by one."""


def parser() -> argparse.ArgumentParser:
    flags = Flags(
        prog="bitfoundry selftest",
        description="Check a device: the numeric parts of the engine and a small job run on it and on the CPU, and the"
        " results are compared and timed. Speeds are shown beside those that plans assume. It takes up to two minutes"
        " and needs no network. Exit status 1 if results differ. Without an accelerator it checks the installation on"
        " the CPU alone.",
    )
    flags.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: the one that jobs use)")
    flags.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    flags.add_argument(
        "--report",
        type=new_file,
        metavar="FILE",
        help="also write the report as JSON, to attach to an issue; it names versions and the device, but no paths",
    )
    return flags


def answer(options: argparse.Namespace, emit: Emit) -> Selftest:
    """Run the self-test, and write its report where the flags say. Raises ConfigError for a device that is not here."""
    from quantcore.engine.selftest.run import selftest

    found = selftest(options.device, emit)
    if options.report is not None:
        options.report.write_text(_text(found) + "\n", "utf-8")
    return found


def show(found: Selftest) -> None:
    """Print a row for each group of checks, all that is not as it should be, and the verdict."""
    console, device = Console(), str(found.device["type"])
    on_cpu = device == "cpu"
    table = Table("", "checks", "codes that differ", "largest difference", box=None)
    table.add_column(device)
    table.add_column("beside" if on_cpu else "CPU")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in dict.fromkeys(check.group for check in found.checks):
        table.add_row(*_row(group, [check for check in found.checks if check.group == group]))
    console.print(table)
    if found.speeds:
        console.print(_speeds(found.speeds))
    faults = [check for check in found.checks if check.verdict != "agreed"]
    for check in faults[:MAX_SHOWN]:
        console.print(f"[bold red]{check.verdict}[/] {_fault(check)}", highlight=False, soft_wrap=True)
    if len(faults) > MAX_SHOWN:
        console.print(f"... and {len(faults) - MAX_SHOWN} more: the report of --json or --report has them all")
    if on_cpu:
        about = "The CPU alone was checked, beside float64 or other code, or in several threads."
    else:
        about = f"{found.device.get('name', device)} was compared with the CPU ({found.num_threads} threads)."
    style, verdict = ("bold green", "agreed") if found.agreed else ("bold red", "differs")
    console.print(f"{about}\n[{style}]{verdict}[/] after {found.seconds:.0f} s", highlight=False)


def _speeds(speeds: Sequence[Speed]) -> Table:
    table = Table("", "speed", "bitfoundry plan assumes", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in speeds:
        scale, unit = (1e12, "TFLOP/s") if one.unit == "FLOP" else (1e9, "GB/s")
        found, planned = (one.amount / scale / seconds for seconds in (one.seconds, one.planned_s))
        table.add_row(one.name, f"{found:.3g} {unit}", f"{planned:.3g} {unit}")
    return table


def show_json(found: Selftest) -> None:
    print(_text(found))


def _text(found: Selftest) -> str:
    return json.dumps(found.to_dict(), indent=2)


def _row(group: str, checks: Sequence[Check]) -> tuple[str, ...]:
    shares = [one.difference.share for one in checks if one.difference and one.difference.share is not None]
    largest = [one.difference.largest for one in checks if one.difference and one.difference.largest is not None]
    times = ([one.device_s for one in checks], [one.beside_s for one in checks])
    return (
        group,
        str(len(checks)),
        f"{100 * max(shares):.2g} %" if shares else "",
        f"{max(largest):.1e}" if largest else "",
        *(f"{sum(known):.3f} s" if (known := [one for one in column if one is not None]) else "" for column in times),
    )


def _fault(check: Check) -> str:
    """Return what is wrong with a check, and what would have been right."""
    what, allowed = f"{check.group} {check.name}", check.allowed
    if check.difference is None:
        return f"{what}: {check.error}"
    found = check.difference
    parts = []
    if found.share is not None:
        parts.append(f"{100 * found.share:.3g} % of {found.num_codes} codes (allowed: {100 * allowed.share:g} %)")
    if found.largest is not None:
        parts.append(f"largest relative difference {found.largest:.2e} (allowed: {allowed.largest:.0e})")
    return f"{what}: {', '.join(parts)}. {allowed.why}"
