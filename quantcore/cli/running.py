"""How commands run their work: as one of several ranks, under a progress bar or with JSON lines; and the proof."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantcore.cli.explain import explained
from quantcore.cli.inputs import check_task
from quantcore.cli.next_steps import command_for
from quantcore.cli.resuming import Progress
from quantcore.config.task import Task, read_task
from quantcore.engine.selftest.values import Selftest
from quantcore.errors import QuantError, RankError, reason_of
from quantcore.events import Emit, Failed, print_json_lines, silence
from quantcore.report import local_runs
from quantcore.report.evaluation_result import EvaluationResult
from quantcore.report.quality import PairedQuality, Record
from quantcore.report.values import Report, Summary
from quantcore.sandbox.opening import unchanging

T = TypeVar("T")
INTERRUPTED = 130
"""Exit status after Ctrl-C and SIGTERM."""
WORSE = 3
"""Exit status of ``compare NEW OLD --against ORIGINAL`` if the new result is worse, and of ``evaluate --gate fail``."""
ENGINE = ("quantcore.engine.pipeline.job", "quantcore.engine.pipeline.tiny_export", "transformers.modeling_utils")
"""The modules that a job and its proof take seconds to load."""


def rank() -> int | None:
    """Return the rank of this process among those that torchrun started; None without torchrun."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def is_first_rank() -> bool:
    """Return True on the first rank, and without torchrun."""
    return not rank()


@dataclass(frozen=True)
class Asked:
    """A run that was asked for: its ``options``, which ``task_of`` makes a task of, and its whole ``command`` line.

    ``config`` names its config in the list of local runs.
    """

    options: argparse.Namespace
    task_of: Callable[[argparse.Namespace], Task]
    command: Sequence[str]
    config: str

    def task(self, progress: Progress) -> Task:
        """Return the task, with a folder for its progress. Raises QuantError for what is missing on this machine."""
        task = self.task_of(self.options)
        check_task(task)
        return progress.kept_of(task)

    def quantized(self, task: Task, progress: Progress, emit: Emit) -> Report | None:
        """Run the task, and record its result as a local run. Returns None on all ranks but the first."""
        report = pipeline(task, progress.noting(emit))
        if report is not None:
            _record(task, report, self)
        return report


def run_here(asked: Asked) -> int:
    """Run what was asked in this process, or as one of the ranks that torchrun started, and show the report.

    After a stop it says what is kept, and that the command line continues there.
    """
    progress = Progress(asked.command)
    try:
        status = _run(asked, progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status and is_first_rank() and (left := progress.after_a_stop(is_interrupted=status == INTERRUPTED)):
        print(left, file=sys.stderr)
    return status


def _run(asked: Asked, progress: Progress) -> int:
    from quantcore.cli.console import explain, show_report

    options = asked.options

    def prepared(stack: ExitStack) -> Task:
        task = asked.task(progress)
        stack.enter_context(proof_standing_by())  # before the progress bar, which has a thread
        return task

    def show(report: Report | None) -> None:
        assert report is not None  # this is the first rank
        given, paths = asked.command[2:], {"model_dir": options.model_dir, "output_dir": options.output_dir}
        show_report(report, options.output_dir, lambda step, number: command_for(step, number, given, **paths))

    with ExitStack() as stack:
        if options.json or not is_first_rank():
            emit = print_json_lines(sys.stdout if options.json else sys.stderr)
            return reporting(lambda emit: asked.quantized(prepared(stack), progress, emit), emit)
        try:
            with explained(silence):
                task = prepared(stack)
        except QuantError as error:
            explain(error)
            return 1
        return shown(lambda emit: asked.quantized(task, progress, emit), show)


def _record(task: Task, report: Report, asked: Asked) -> None:
    """Record the result as a local run. The result counts also where the user's data folder cannot be written."""
    try:
        local_runs.record(task.output_dir, report, asked.config, asked.command)
    except OSError as error:
        print(f"The run is not in `bitfoundry list`: {reason_of(error)}", file=sys.stderr)


def shown(work: Callable[[Emit], T], show: Callable[[T], object]) -> int:
    """Run ``work`` under a progress bar, then ``show`` its result; a QuantError is explained and gives status 1."""
    from quantcore.cli.console import explain, progress_display

    try:
        with progress_display() as emit, explained(emit) as noting:
            done = work(noting)
        show(done)
        return status_of(done)
    except QuantError as error:
        explain(error)
        return 1


def print_json(result: object) -> None:
    print(json.dumps(result.to_dict() if isinstance(result, Record) else result, indent=2))


def status_of(done: object) -> int:
    """Return 1 if tasks of the evaluation failed, which a report and the result of ``evaluate`` name; else 0.

    A new result that is worse than the old one gives WORSE. A self-test that found a difference gives 1.
    """
    if isinstance(done, PairedQuality):
        return WORSE if done.verdict == "worse" else 0
    if isinstance(done, Selftest):
        return int(not done.agreed)
    measured = done.summary if isinstance(done, Report) else done
    return int(isinstance(measured, Summary | EvaluationResult) and bool(measured.failed_tasks))


def saying_nothing(work: Callable[[Emit], object]) -> Callable[[Emit], None]:
    """Return ``work`` without its result, so that the result does not decide the exit status."""

    def alone(emit: Emit) -> None:
        work(emit)

    return alone


@contextmanager
def proof_standing_by() -> Iterator[None]:
    """Load the engine, and keep a process waiting that verifies the result (see ``sandbox.fork_server``).

    Not in a program that has used torch before: its threads would be missing in a fork.
    """
    if not is_first_rank() or "torch" in sys.modules:
        yield
        return
    for name in ENGINE:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")  # type: ignore[no-untyped-call]  # compiles all patterns, and keeps them
    from quantcore.sandbox.fork_server import standing_by

    gc.freeze()  # neither process frees what was imported, so it need not be scanned again
    with standing_by(verify):
        yield


def verify(arguments: Sequence[str]) -> int:
    """Run ``verify FOLDER EXPECTED``: compare the files in FOLDER with the pipeline's notes in EXPECTED."""
    if len(arguments) != 2:
        print("usage: python -m quantcore verify FOLDER EXPECTED", file=sys.stderr)
        return 2

    def work(emit: Emit) -> None:
        from quantcore.engine.pipeline.tiny_export import export_twin
        from quantcore.engine.runtime.devices import limit_threads
        from quantcore.engine.verification.fresh_process import STAMPS, peak_line, proof_line
        from quantcore.engine.verification.verify import prove_all

        limit_threads()
        folder, scratch = map(Path, arguments)
        task = read_task(scratch / "task.json")
        with unchanging(task.model_folder, json.loads((scratch / STAMPS).read_text("utf-8"))) as seen:
            for proof in prove_all(task, folder, scratch, emit, export_twin):
                seen.check()
                print(proof_line(proof), flush=True)
        print(peak_line(), flush=True)

    return reporting(work, print_json_lines())


def pipeline(task: Task, emit: Emit) -> Report | None:
    from quantcore.engine.commands.goal import run_goal
    from quantcore.engine.pipeline.job import run
    from quantcore.engine.runtime.devices import limit_threads
    from quantcore.engine.runtime.ranks import joined

    limit_threads()
    with joined() as ranks:
        return run(task, emit, ranks) if task.goal is None else run_goal(task, emit, ranks)


def reporting(work: Callable[[Emit], object], emit: Emit) -> int:
    """Run ``work``; a QuantError becomes the last event and status 1. Only the first rank reports a lost rank."""
    try:
        with explained(emit) as noting:
            return status_of(work(noting))
    except QuantError as error:
        if isinstance(error, RankError) and not is_first_rank():
            return 1
        emit(Failed(error.code, error.message, error.hint, error.retryable, rank(), error.block))
        return 1
