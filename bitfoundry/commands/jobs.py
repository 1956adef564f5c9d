"""The commands for existing jobs (`COMMANDS`) and for sweeps (`SWEEP_COMMANDS`)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitfoundry.client.bodies import given
from bitfoundry.commands import terminal
from bitfoundry.commands.names import find_id
from bitfoundry.commands.options import (
    AsJson,
    Home,
    JobId,
    Key,
    Labels,
    Priority,
    ResultName,
    Url,
    connect,
    connect_if_any,
    key_value,
    read_config,
    show_deleted,
    show_job,
    with_client,
)
from bitfoundry.commands.publish import await_published
from bitfoundry.commands.sweeps import sweep_table, sweeps_table
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.answers import Job, LogLine
    from bitfoundry.client.service import Client
    from quantcore.report.local_runs import LocalRun
    from quantcore.report.quality import Step

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")]
SweepId = Annotated[str, typer.Argument(help="Sweep: its id or the start of it, its name, or `last` for the newest.")]
Name = Annotated[str | None, typer.Option(help="Name of the job.")]


def list_jobs(
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state. Repeatable.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this key=value label. Repeatable; all must match.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only jobs for this model (path or Hub id).")] = None,
    text: Annotated[
        str | None, typer.Option("--text", "-q", help="Only jobs with this text in the name, id, model or preset.")
    ] = None,
    created_after: Annotated[
        str | None, typer.Option(help="Only jobs created after this time, with its time zone: 2026-11-22T08:00:00Z.")
    ] = None,
    created_before: Annotated[str | None, typer.Option(help="Only jobs created before this time.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Only jobs of this sweep: its id or name, or `last`.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 20,
    count: Annotated[
        bool, typer.Option("--count", help="Print the number of jobs in each state instead of a list.")
    ] = False,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs of the service and the runs of this machine, newest first.

    Runs of this machine are results of `quantize` and `auto`. Without a service they are all; --count and filters other
    than --text leave them out.
    """
    from quantcore.report import local_runs

    wanted: dict[str, Any] = {
        "states": state or (),
        "labels": dict(map(key_value, label or ())),
        "model": model,
        "text": text,
        "created_after": created_after,
        "created_before": created_before,
        "sweep": sweep,
    }
    if sweep is not None:
        with connect(url, api_key, home) as client:
            wanted["sweep"] = find_id(client, "sweep_id", sweep)
    if count:
        with connect(url, api_key, home) as client:
            summary = client.summary(**wanted)
        if as_json:
            terminal.print_json(summary.model_dump(mode="json"))
        else:
            terminal.out.print(terminal.summary_table(summary))
        return
    are_filtered = any(value for name, value in wanted.items() if name != "text")
    found = connect(url, api_key, home) if are_filtered else connect_if_any(url, api_key, home)
    jobs: list[Job] = []
    if found is not None:
        with found as client:
            jobs = [*islice(client.list(page_size=min(limit, 100), **wanted), limit)]
    runs = [] if are_filtered else [run for run in local_runs.runs() if text is None or text in _text_of(run)]
    _show_list(jobs, runs[:limit], as_json)


def show(name: ResultName, url: Url = None, api_key: Key = None, home: Home = None, as_json: AsJson = False) -> None:
    """Show one job, or one run of this machine."""
    from bitfoundry.commands.results import LocalRun, find_result
    from quantcore.report import local_runs

    if (Path(name) / "report.json").is_file():
        _show_folder(Path(name), local_runs.of_folder(Path(name)), as_json)
        return
    client = connect_if_any(url, api_key, home)
    with client or nullcontext():
        result = find_result(name, client)
    if isinstance(result, LocalRun):
        _show_folder(Path(result.folder), result, as_json)
    else:
        show_job(result, as_json)


@with_client
def watch(client: Client, job_id: JobId, as_json: AsJson = False) -> None:
    """Watch a job until it has ended and is published. Ctrl-C does not stop it. Status 1 if it did not succeed."""
    show_end(client, client.get(job_id), as_json)


def show_end(client: Client, job: Job, as_json: bool) -> None:
    """Show a job's progress until it has ended and is published, then the job. Raises typer.Exit if it failed."""
    with terminal.Watch(terminal.err) as progress:
        job = client.wait(job.id, on_change=progress.update)
    if job.publication:
        job = await_published(client, job)
    show_job(job, as_json)
    if job.state != "succeeded" or (job.publication and job.publication.state == "failed"):
        raise typer.Exit(1)


@with_client
def events(
    client: Client,
    job_id: JobId,
    follow: Follow = False,
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind. Repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the events of a job, one per line (with --json, one JSON object per line)."""
    stream = client.stream_events(job_id) if follow else client.events(job_id, kinds=kind or ())
    for event in stream:
        if not kind or event.kind in kind:
            print(event.model_dump_json() if as_json else terminal.event_line(event), flush=True)


@with_client
def logs(
    client: Client,
    job_id: JobId,
    follow: Follow = False,
    tail: Annotated[int | None, typer.Option(min=1, max=1000, help="Only the last N lines.")] = None,
    level: Annotated[str, typer.Option(help="Minimum level: debug, info, warning or error.")] = "debug",
    as_json: AsJson = False,
) -> None:
    """Show the log of a job (with --json, one JSON object per line)."""
    after = 0
    if tail is not None or not follow:
        for line in client.logs(job_id, level=level, tail=tail):
            after = line.seq
            _say(line, as_json)
    if follow:
        for line in client.stream_logs(job_id, level=level, after=after):
            _say(line, as_json)


@with_client
def cancel(client: Client, job_id: JobId, as_json: AsJson = False) -> None:
    """Cancel a job. A queued job ends at once, a running one as soon as its engine has stopped."""
    show_job(client.cancel(job_id), as_json)


@with_client
def pause(client: Client, job_id: JobId, as_json: AsJson = False) -> None:
    """Pause a job. A running job is stopped, and continues after its last saved block when resumed."""
    show_job(client.pause(job_id), as_json)


@with_client
def resume(client: Client, job_id: JobId, as_json: AsJson = False) -> None:
    """Resume a paused job."""
    show_job(client.resume(job_id), as_json)


@with_client
def retry(
    client: Client,
    job_id: JobId,
    elsewhere: Annotated[bool, typer.Option("--elsewhere", help="Not on the machine of the last attempt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Queue a failed or cancelled job again, with a full set of attempts."""
    show_job(client.retry(job_id, elsewhere=elsewhere), as_json)


@with_client
def edit(
    client: Client,
    job_id: JobId,
    name: Name = None,
    label: Labels = None,
    priority: Priority = None,
    pinned: Annotated[
        bool | None, typer.Option("--pin/--unpin", help="Exclude the job from retention, or include it again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the name, labels or priority of a job, or pin it. New labels replace all old ones."""
    show_job(client.edit(job_id, _settings(name, label, priority) | given(pinned=pinned)), as_json)


@with_client
def delete(client: Client, job_id: JobId, as_json: AsJson = False) -> None:
    """Delete a job that has ended, with its events, log and artifact."""
    client.delete(job_id)
    show_deleted(job_id, as_json)


@with_client
def submit_sweep(
    client: Client,
    file: Annotated[Path, typer.Argument(help="JSON file with the fields name, job and matrix.")],
    as_json: AsJson = False,
) -> None:
    """Queue one job per combination of values. Either all jobs are queued or none."""
    content = read_config(str(file))
    body: dict[str, Any] = content if isinstance(content, dict) else {}
    sweep = client.submit_sweep(body.get("job", {}), body.get("matrix", {}), name=body.get("name"))
    _show_sweep(sweep, as_json)


@with_client
def list_sweeps(
    client: Client,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of sweeps.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List sweeps, newest first, each with its axes, its jobs by state and its best result."""
    sweeps = [*islice(client.sweeps(page_size=min(limit, 100)), limit)]
    if as_json:
        terminal.print_json([sweep.model_dump(mode="json") for sweep in sweeps])
    else:
        terminal.out.print(sweeps_table(sweeps))


@with_client
def show_sweep(
    client: Client,
    sweep_id: SweepId,
    as_json: AsJson = False,
) -> None:
    """Show a sweep as a table: the values of each job, its state, size, divergence and verdict."""
    _show_sweep(client.sweep(sweep_id), as_json)


@with_client
def cancel_sweep(
    client: Client,
    sweep_id: SweepId,
    as_json: AsJson = False,
) -> None:
    """Cancel all jobs of a sweep that have not ended."""
    _show_sweep(client.cancel_sweep(sweep_id), as_json)


COMMANDS: dict[str, Callable[..., None]] = {"list": list_jobs} | {
    command.__name__: command for command in (show, watch, events, logs, cancel, pause, resume, retry, edit, delete)
}
SWEEP_COMMANDS: dict[str, Callable[..., None]] = {
    "submit": submit_sweep,
    "list": list_sweeps,
    "show": show_sweep,
    "cancel": cancel_sweep,
}


def _text_of(run: LocalRun) -> str:
    return " ".join((run.id, run.name, run.model, run.config))


def _row_of(run: LocalRun) -> dict[str, str]:
    return {
        "id": run.id[:12],
        "name": run.name,
        "config": run.config,
        "verdict": run.verdict or "",
        "size": terminal.megabytes(run.size_bytes),
        "created_at": run.created_at,
        "folder": run.folder,
    }


def _show_list(jobs: Sequence[Job], runs: Sequence[LocalRun], as_json: bool) -> None:
    if as_json:
        local = [run.to_dict() | {"name": run.name, "is_local": True} for run in runs]
        terminal.print_json([*(job.model_dump(mode="json") for job in jobs), *local])
        return
    if not jobs and not runs:
        terminal.out.print("No matching jobs or runs. Make one with `bitfoundry submit` or `bitfoundry quantize`.")
    if jobs:
        terminal.out.print(terminal.jobs_table(jobs))
    if runs:
        terminal.out.print(Text("\nruns of this machine" if jobs else "runs of this machine", "bold"))
        rows = [_row_of(run) for run in runs]
        terminal.out.print(terminal.rows_table(rows, [*rows[0]]))


def _show_folder(folder: Path, run: LocalRun | None, as_json: bool) -> None:
    """Show the summary of the report in ``folder``, and what is known of the ``run`` that made it."""
    from quantcore.cli.console import show_report
    from quantcore.errors import QuantError
    from quantcore.report.compare import read_report

    try:
        report = read_report(folder)
    except QuantError as error:
        raise BitfoundryError.of(error) from error
    if as_json:
        about = {} if run is None else run.to_dict() | {"name": run.name}
        terminal.print_json(about | {"folder": str(folder.absolute()), "summary": report.summary.to_dict()})
        return
    model = report.model.path or str(report.model.id)
    terminal.out.print(terminal.pairs(({} if run is None else {"id": run.id}) | {"model": model}))
    command_of = _command_of(run, model) if run is not None and run.command else None
    show_report(report, str(folder), command_of)


def _command_of(run: LocalRun, model_dir: str) -> Callable[[Step, int], str]:
    """Return what gives the command of a step, to be copied: the one that made the ``run``, changed."""
    from quantcore.cli.next_steps import command_for

    is_elsewhere = run.working_dir != str(Path.cwd())
    change_dir = f"cd {shlex.quote(run.working_dir)} && " if is_elsewhere else ""
    paths = {"model_dir": model_dir, "output_dir": run.folder}
    return lambda step, number: change_dir + command_for(step, number, run.command[2:], **paths)


def _say(line: LogLine, as_json: bool) -> None:
    print(line.model_dump_json() if as_json else terminal.log_line(line), flush=True)


def _settings(name: str | None, label: list[str] | None, priority: int | None) -> dict[str, Any]:
    labels = dict(map(key_value, label)) if label else None
    return given(name=name, labels=labels, priority=priority)


def _show_sweep(sweep: Any, as_json: bool) -> None:
    if as_json:
        terminal.print_json(sweep.model_dump(mode="json"))
    else:
        terminal.out.print(sweep_table(sweep))
