"""``bitfoundry quantize MODEL Q4_K_M,Q5_K_M,Q8_0``: a result for each of several presets, one after the other.

Each is a whole job with a folder of its own, OUT/PRESET, which has its own proof, report and progress. The jobs share
the measurements of the original model (``BaselineCache``). They do not share the statistics of calibration: each
layer is calibrated with the inputs that the quantized layers before it give, and these differ from preset to preset.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import MANIFEST, written_whole
from quantcore.cli.explain import explained
from quantcore.cli.from_flags import task_of
from quantcore.cli.grammar import default_output
from quantcore.cli.inputs import check_task
from quantcore.cli.next_steps import without
from quantcore.cli.running import INTERRUPTED, Asked, rank, run_here
from quantcore.config.presets import PRESETS
from quantcore.config.task import Task
from quantcore.errors import ConfigError, QuantError
from quantcore.events import silence

RESULTS = "results.json"
"""File in OUT: the name of each result's folder -> the fingerprint of the job that made it."""


def names_of(quant_scheme: str) -> list[str]:
    """Return the presets or config files in a list with commas; a single one as it is."""
    return [name for part in quant_scheme.split(",") if (name := part.strip())]


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Quantize with each preset of ``options.quant_scheme``, and show all results.

    Results that the same command made before are kept. Returns the exit status: 0 if all succeeded, 1 if not.
    """
    from quantcore.cli.console import explain

    names = names_of(options.quant_scheme)
    folder = Path(options.output_dir or default_output(options.model_dir, *names)).absolute()
    results = _Results(folder)
    try:
        with explained(silence):
            asked = _asked(names, options, arguments, folder)
            missing = {name: each for name, each in asked.items() if not results.has(each.task_of(each.options))}
            for each in missing.values():
                check_task(each.task_of(each.options))
    except QuantError as error:
        explain(error)
        return 1
    statuses = dict.fromkeys(asked, 0)
    for number, (name, each) in enumerate(asked.items(), 1):
        print(f"{name} ({number} of {len(asked)})" + ("" if name in missing else ": made before"), file=sys.stderr)
        if name in missing:
            folder.mkdir(parents=True, exist_ok=True)
            statuses[name] = run_here(each)
            results.note(each.task_of(each.options))
        if statuses[name] == INTERRUPTED:
            print(f"The whole command continues there:\n  {_line(arguments)}", file=sys.stderr)
            return INTERRUPTED
    folders = {name: Path(each.options.output_dir) for name, each in asked.items()}
    if not options.json:
        _show(folders)
    if failed := [name for name, each in folders.items() if not (each / MANIFEST).is_file()]:
        print(
            f"Failed: {', '.join(failed)}. The errors are above. The same command tries them again and keeps the"
            f" others:\n  {_line(arguments)}",
            file=sys.stderr,
        )
    return int(any(statuses.values()))


def _line(arguments: Sequence[str]) -> str:
    return shlex.join(["bitfoundry", "quantize", *arguments])


def _asked(
    names: Sequence[str], options: argparse.Namespace, arguments: Sequence[str], folder: Path
) -> dict[str, Asked]:
    """Return the run of each preset, by the name of its folder. Raises ConfigError for a preset that is named twice."""
    if rank() is not None:
        raise ConfigError(
            "Several presets in one command are quantized by one process, and torchrun started several.",
            code="unsupported_config",
            hint="Give one preset for each torchrun command.",
        )
    asked: dict[str, Asked] = {}
    for name in names:
        short = Path(name).stem if name.endswith(".json") else _in_its_case(name)
        if short in asked:
            raise ConfigError(
                f"{short} is named twice in {options.quant_scheme}.",
                code="invalid_config",
                hint="Name each preset once, and give config files different names.",
                field="/config/preset",
            )
        own = copy.copy(options)
        own.quant_scheme, own.output_dir = name, str(folder / short)
        places = ["-o", own.output_dir]
        if options.resume_dir is not None:
            own.resume_dir = str(Path(options.resume_dir) / short)
            places += ["--resume_dir", own.resume_dir]
        words = without({"o", "output", "output_dir", "resume_dir"}, arguments)
        alone = [word.replace(options.quant_scheme, name) for word in words]
        asked[short] = Asked(own, task_of, ("bitfoundry", "quantize", *alone, *places), name)
    return asked


def _in_its_case(name: str) -> str:
    """Return the name as the list of presets spells it: ``Q4_K_M`` for ``q4_k_m``."""
    return next((known for known in PRESETS if known.lower() == name.lower()), name)


@dataclass(frozen=True)
class _Results:
    """The results in a ``folder``, and the jobs that made them."""

    folder: Path

    def has(self, task: Task) -> bool:
        """Return True if the result in the output folder of ``task`` is its result, and of the same model files."""
        name = task.output_dir.name
        return (task.output_dir / MANIFEST).is_file() and self._read().get(name) == _fingerprint(task)

    def note(self, task: Task) -> None:
        """Note the job that made the result, if there is one."""
        if (task.output_dir / MANIFEST).is_file():
            content = self._read() | {task.output_dir.name: _fingerprint(task)}
            with written_whole(self.folder / RESULTS) as scratch:
                scratch.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / RESULTS).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def _fingerprint(task: Task) -> str:
    from quantcore.engine.blockwise.savepoint import fingerprint
    from quantcore.hub.download import fetch

    return fingerprint(fetch(task, silence))


def _show(folders: dict[str, Path]) -> None:
    """Show size, quality and verdict of each result, and which presets failed."""
    from rich.console import Console
    from rich.table import Table

    from quantcore.report.compare import read_report

    table = Table("", "size", "mean KL", "perplexity", "verdict", "folder", box=None)
    for name, folder in folders.items():
        if not (folder / MANIFEST).is_file():
            table.add_row(name, "", "", "", "failed", "")
            continue
        report = read_report(folder)
        summary, quality = report.summary, report.quality
        measured = ("", "") if quality is None else (quality.divergence.kl_mean, quality.after.token_perplexity)
        verdict = "" if summary.verdict is None else summary.verdict.level
        table.add_row(name, f"{summary.size_after_bytes / 1e6:.1f} MB", *map(str, measured), verdict, str(folder))
    Console().print(table)
