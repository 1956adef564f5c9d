"""Checks the files and folders that a command line names before torch loads, which takes seconds. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from quantcore.checkpoint.artifact import check_free
from quantcore.config.job_spec import Evaluation
from quantcore.config.task import AdapterSource, EvaluationConfig, Task
from quantcore.data.documents import find_file
from quantcore.data.imatrix import find_imatrix
from quantcore.data.prompts import read_prompts_file
from quantcore.errors import ConfigError
from quantcore.events import Emit
from quantcore.hub.adapter import checked
from quantcore.hub.names import find_local, is_remote
from quantcore.importing.model import read_model
from quantcore.report import local_runs
from quantcore.report.values import MergedAdapter

Find = Callable[[str], Path | None]
"""Returns the folder of a result by its name: an id, the start of an id, a name or `last`."""


def find_run(name: str) -> Path | None:
    """Return the folder of a local run, None if there is none. Raises ConfigError ``run_not_unique``."""
    found = local_runs.find(name)
    if len(found) > 1:
        raise ConfigError(
            f"'{name}' fits {len(found)} local runs: {', '.join(run.folder for run in found)}.",
            code="run_not_unique",
            hint="Give the folder, or the id from `bitfoundry list`.",
        )
    return Path(found[0].folder) if found else None


def path_of(name: str, find: Find) -> str:
    """Return the path of the model or result that ``name`` stands for; a path, a Hub id or a URL stands for itself."""
    if Path(name).exists() or is_remote(name):
        return name
    return str(find(name) or name)


def check_task(task: Task) -> None:
    """Raise the error for the model, a text or the output folder of ``task``, from what is on this machine.

    Of the model and its adapter the headers are read: what does not fit, and a missing file, is found as well.
    """
    check_free(task.output_dir)
    if task.model_dir is not None:
        find_local(str(task.model_dir))
        read_model(task.model_dir, task.adapter_folder)
    for part in task.calibration.parts:
        find_file(part)
    if task.config.imatrix is not None:
        find_imatrix(task.config.imatrix)
    check_text(task.evaluation)
    check_prompts(task.evaluation)


def find_merged(adapter: MergedAdapter, emit: Emit) -> Path:
    """Return the folder of the adapter that was merged into a result's original, downloaded if necessary.

    Raises ModelError: ``no_adapter``, ``adapter_changed``, ``hub_*``.
    """
    folder = None if adapter.path is None else Path(adapter.path)
    source = AdapterSource(folder=folder, id=adapter.id or "", revision=adapter.sha or "", digest=adapter.digest)
    return checked(source, emit)[0]


def check_models(*names: str | Path | None) -> None:
    """Raise ModelError ``model_not_found`` for a name that is neither a path nor one that can be downloaded."""
    for name in names:
        if name is not None:
            find_local(str(name))


def check_text(evaluation: Evaluation) -> None:
    """Raise CalibrationError ``calibration_not_found`` for a text of its own that is no file and not on the Hub."""
    if evaluation.text is not None:
        find_file(evaluation.text)


def check_prompts(evaluation: EvaluationConfig) -> None:
    """Raise the ConfigError of ``read_prompts_file`` for a file with prompts that cannot be asked."""
    if evaluation.prompts is not None:
        read_prompts_file(evaluation.prompts)


def found(options: argparse.Namespace, find: Find) -> argparse.Namespace:
    """Return ``options`` with the folder of the result whose name is given as the model."""
    options.model_dir = path_of(options.model_dir, find)
    return options
