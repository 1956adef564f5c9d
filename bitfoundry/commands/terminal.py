"""Output for people: errors, tables, progress of jobs. It is live on a terminal, and one line per step in a log."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bitfoundry.commands.verdicts import verdict_rows, verdict_text

if TYPE_CHECKING:
    from bitfoundry.client.answers import (
        Dataset,
        Event,
        Inspection,
        Job,
        JobSummary,
        LogLine,
        MixSummary,
        Publication,
        Summary,
    )
    from bitfoundry.client.model_answers import Recipe

# No markup: names of models and jobs come from others and are shown as they are. Styles come as Text.
out = Console(markup=False, highlight=False)
err = Console(markup=False, highlight=False, stderr=True)

MAX_WIDTH = 10_000  # characters: more than any table needs
STATE_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "paused": "magenta"}


def print_json(data: Any) -> None:
    """Print a JSON document on stdout, for programs: no colours, no wrapping."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def finding_line(status: str, name: str, detail: str, hint: str) -> Text:
    """Return a finding of `doctor` as text; its status is a word as well as a colour."""
    style = {"ok": "green", "warning": "yellow", "failed": "bold red"}[status]
    advice = f"\n{'':18}{hint}" if hint else ""
    return Text.assemble((f"{status:8}", style), f"{name:10}", detail, (advice, "dim"))


def megabytes(num_bytes: float) -> str:
    """Format a size in decimal megabytes, the unit of disks and downloads."""
    return f"{num_bytes / 1e6:,.1f} MB"


def state_text(state: str) -> Text:
    return Text(state, STATE_STYLES.get(state, ""))


class Fitting:
    """Shows `wide` if none of its cells has to be folded, else `narrow`."""

    def __init__(self, wide: RenderableType, narrow: RenderableType) -> None:
        self._wide = wide
        self._narrow = narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(width=MAX_WIDTH), self._wide).maximum
        yield self._wide if needed <= options.max_width else self._narrow


def _plain_table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == headings[0])
    for row in rows:
        table.add_row(*row)
    return table


def _fitting_table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Fitting:
    """Return a table with one line per row if that fits, else one line per value."""
    records = [pairs({name: value for name, value in zip(headings, row, strict=True) if value}) for row in rows]
    apart = [part for record in records for part in (record, "")][:-1]
    return Fitting(_plain_table(headings, rows), Group(*apart))


def jobs_table(jobs: Sequence[Job]) -> Fitting:
    """Return jobs as a table in the given order; two lines per job if one would be too long."""
    rows: list[tuple[str | Text, ...]] = [
        (job.id, job.name or "", scheme_of(job), state_text(job.state), _news(job), job.created_at[:19]) for job in jobs
    ]
    narrow = _plain_table(
        ("id\nname", "state\nphase or verdict", "config\ncreated"),
        [
            (
                f"{job_id}\n{shortened(str(name), 36)}",
                Text.assemble(state, "\n", phase),
                f"{shortened(str(config), 19)}\n{created}",
            )
            for job_id, name, config, state, phase, created in rows
        ],
    )
    return Fitting(_plain_table(("id", "name", "config", "state", "phase or verdict", "created"), rows), narrow)


def shortened(text: str, width: int) -> str:
    """Shorten `text` to at most `width` characters: 'a-long-na…w4a16'."""
    head = width // 2
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"


def scheme_of(job: Job | Recipe) -> str:
    """Return the preset's name; for a mix its schemes, for a goal the runtime and the device."""
    if job.goal:
        return f"auto for {job.goal['runtime']} on {job.goal['device']}"
    return job.preset or (f"mix of {', '.join(job.mix['schemes'])}" if job.mix else "custom")


def mix_text(mix: MixSummary | None) -> str:
    """Return '126 w4a16, 84 int8_weight_only: 5.00 bits per weight' for a job with a mix, else ''."""
    if mix is None:
        return ""
    return f"{', '.join(f'{num} {scheme}' for scheme, num in mix.layers.items())}: {mix.bits:.2f} bits per weight"


def progress_text(job: Job) -> str:
    """Return the progress of the phase and what is left of the job, as far as known; or why it waits."""
    progress = job.progress
    if job.waiting_reason:
        return job.waiting_reason
    if job.is_final or progress is None or progress.phase != job.phase:
        return "" if job.is_final else job.phase or allocation_text(job)
    left = "" if progress.eta_s is None else f", {progress.eta_s:.0f} s left"
    of_job = "" if job.eta_s is None else f", about {max(job.eta_s, progress.eta_s or 0):.0f} s until the job ends"
    return f"{progress.phase}: {progress.unit} {progress.done} of {progress.total}{left}{of_job}"


def allocation_text(job: Job) -> str:
    """Return where a scheduler runs the job, or why it waits; "" for a job on a worker's own machine."""
    where = job.allocation
    if where is None:
        return ""
    if where.state == "AWAY":
        return f"{where.launcher} does not answer"
    place = f" ({where.reason})" if where.reason else f" on {where.nodes}" if where.nodes else ""
    return f"{where.launcher} job {where.id}: {where.state}{place}"


def _news(job: Job) -> str:
    """Return what a list says of a job: its progress, or the verdict on its result."""
    return progress_text(job) or verdict_text(job)


def job_details(job: Job) -> Table:
    """Return a table of a job's properties and results."""
    rows: list[tuple[str, str | Text]] = [
        ("id", job.id),
        ("name", job.name or ""),
        ("model", str(job.model.get("path") or f"{job.model.get('id')} ({job.model.get('revision')})")),
        ("config", scheme_of(job)),
        ("state", state_text(job.state)),
        ("phase", "" if job.is_final else progress_text(job)),
        ("runs on", allocation_text(job)),
        ("labels", ", ".join(f"{name}={value}" for name, value in job.labels.items())),
        ("priority", "" if job.is_final else str(job.priority)),
        ("attempt", str(job.attempt) if job.attempt > 1 else ""),
        ("not on", job.avoid_host or ""),
        ("created", job.created_at),
        ("finished", job.finished_at or ""),
    ]
    if job.error:
        rows += [("error", f"{job.error.message} ({job.error.code})"), ("hint", job.error.hint)]
        rows.append(("retry", f"may help: bitfoundry retry {job.id}" if job.error.retryable else "will not help"))
    if job.summary:
        every = summary_rows(job.summary)
        first = {name: text for name, text in every.items() if name == "goal"} | verdict_rows(job)
        rows += [*first.items(), ("layers", mix_text(job.summary.mix))]
        rows += [(name, text) for name, text in every.items() if name not in first]
    if job.artifact:
        rows.append(("download", f"bitfoundry download {job.id}"))
    if job.publication:
        rows += publication_rows(job.publication).items()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(name, text)
    return table


def publication_rows(publication: Publication) -> dict[str, str]:
    """Return rows about a publication: its state and target, and its address or its error."""
    target, error = publication.target, publication.error
    place = str(target.get("to") or f"{target.get('repo_id')} ({target.get('revision')})")
    rows = {"publication": f"{publication.state} to {place}", "at": publication.url or ""}
    rows["revision"] = publication.revision or ""
    if error:
        rows |= {"publication error": f"{error.message} ({error.code})", "hint": error.hint}
    return rows


def publication_details(publication: Publication) -> Table:
    return pairs(publication_rows(publication))


def event_line(event: Event) -> str:
    """Format an event as a line: '12 12:01:33 progress phase=quantize done=3 ...'."""
    data = " ".join(f"{key}={value}" for key, value in event.data.items() if key != "kind" and value is not None)
    return f"{event.seq:4} {event.at[11:19]} {event.kind} {data}".rstrip()


def log_line(line: LogLine) -> str:
    """Format a line of a log: '12:01:33 warning text'."""
    return f"{line.at[11:19]} {line.level:7} {line.text}"


def rows_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Fitting:
    """Return a table of some columns of rows, with times to the second and missing values empty."""
    headings = [column.removesuffix("_at") for column in columns]
    return _fitting_table(headings, [[_cell(column, row.get(column)) for column in columns] for row in rows])


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if column == "member":
        return str(value["name"])
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return str(value)[:19] if column == "at" or column.endswith("_at") else str(value)


def summary_table(summary: Summary) -> Table:
    """Return a table of the states that have jobs, with the number of each and the sum."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for state, number in summary.by_state.items():
        if number:
            table.add_row(state_text(state), str(number))
    table.add_row(Text("all", "bold"), str(summary.total))
    return table


def datasets_table(datasets: Sequence[Dataset]) -> Fitting:
    """Return datasets as a table in the given order."""
    rows = [
        (
            dataset.id,
            dataset.name,
            dataset.format,
            dataset.column,
            f"{dataset.statistics.get('num_rows', 0):,}",
            megabytes(dataset.bytes),
            dataset.created_at[:19],
        )
        for dataset in datasets
    ]
    return _fitting_table(("id", "name", "format", "column", "rows", "size", "created"), rows)


def dataset_details(dataset: Dataset, statistics: Mapping[str, Any]) -> Table:
    """Return a table of a dataset's properties and statistics."""
    rows = {
        "id": dataset.id,
        "name": dataset.name,
        "file": f"{dataset.format}, {megabytes(dataset.bytes)}, sha256 {dataset.sha256}",
        "columns": ", ".join(f"{name} (text)" if name == dataset.column else name for name in dataset.columns),
        "rows": f"{statistics['num_rows']:,}; empty {statistics['num_empty']:,}, duplicates "
        f"{statistics['num_duplicates']:,}, chats {statistics['num_chats']:,}",
        "characters": _lengths(statistics["chars"]),
    }
    if tokens := statistics.get("tokens"):
        rows["tokens"] = _lengths(tokens["tokens"]) + ("" if tokens["is_whole"] else " (of the first rows)")
        seq_len, num_longer = tokens["seq_len"], tokens["num_longer"]
        rows["windows"] = f"{tokens['num_windows']:,} of {seq_len} tokens; {num_longer:,} rows are longer"
    return pairs(rows)


def inspection_details(found: Inspection) -> Group:
    """Return a model's properties, and a table of the estimates for common presets."""
    quantization = found.quantization or {}
    layers = [f"{layer['count']} × {layer['name']} {layer['shape']}" for layer in found.linear_layers]
    about = {
        "model": str(found.model.get("path") or f"{found.model.get('id')} ({found.model.get('sha')})"),
        "architecture": ", ".join(found.architectures) or found.model_type,
        "blocks": str(found.num_blocks),
        "parameters": f"{found.num_parameters / 1e6:,.1f} M, {', '.join(found.dtypes)}, {megabytes(found.size_bytes)}",
        "layers": "\n".join(layers),
        "embeddings": "tied to the output head" if found.tied_embeddings else "not tied to the output head",
        "experts": " of ".join(str(number) for number in reversed((found.experts or {}).values())),
        "quantized": quantization.get("quant_method") or "no",
        "grid": "; ".join(f"{grid['title']} ({100 * grid['share']:.0f} %)" for grid in found.grids),
        "licence": found.license or "unknown",
        "warnings": "\n".join(found.warnings),
    }
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("preset", "peak memory", "formats"):
        table.add_column(heading)
    for estimate in found.estimates:
        sizes = ", ".join(f"{name} {megabytes(size)}" for name, size in estimate.size_bytes.items())
        refused = (estimate.refused or {}).get("message", "")
        peak = megabytes(estimate.peak_memory_bytes) if estimate.peak_memory_bytes else ""
        table.add_row(estimate.preset, peak, sizes or refused)
    return Group(pairs(about), "", table) if found.estimates else Group(pairs(about))


def _lengths(lengths: Mapping[str, Any]) -> str:
    return f"{lengths['sum']:,}; per row {lengths['min']:,} to {lengths['max']:,}, median {lengths['median']:,}"


def pairs(rows: Mapping[str, str | Text]) -> Table:
    """Return a table of names and values, without those that are empty."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def summary_rows(summary: JobSummary) -> dict[str, str]:
    """Return a finished job's size, perplexity, worst layer, time and memory, with before and after where known."""
    before, after = summary.perplexity_before, summary.perplexity_after
    perplexity = "not measured"
    if before and after:
        perplexity = f"{before:.2f} → {after:.2f}\n{100 * (after / before - 1):+.1f} %"
    worst = summary.worst_layer
    goal = summary.goal
    return {
        **({"goal": f"{'' if goal.is_met else 'missed: '}{goal.why}"} if goal else {}),
        **({"verdict": summary.verdict.level} if summary.verdict else {}),
        "size": f"{megabytes(summary.size_before_bytes)} → {megabytes(summary.size_after_bytes)}",
        "perplexity": perplexity,
        "worst layer": f"{_short_lines(worst.name)}\n{worst.error}",
        "seconds": f"{summary.total_s:.0f}",
        "peak memory": megabytes(summary.peak_memory_bytes),
        **{f"task {task}": f"failed: {reason}" for task, reason in summary.failed_tasks.items()},
    }


def _short_lines(layer: str) -> str:
    """Split 'model.layers.3.mlp.up_proj' into two lines, so that a table of three jobs fits 80 characters."""
    *place, block, name = layer.removeprefix("model.").split(".") if layer.count(".") > 1 else ["", layer]
    return "\n".join(filter(None, [".".join(place), f"{block}.{name}" if block else name]))


def results_table(jobs: Sequence[Job]) -> Table:
    """Return a table with one column per job, which fits 80 characters; a job that did not succeed shows its error."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for job in jobs:
        table.add_column(job.name or scheme_of(job), overflow="fold")
    rows = [summary_rows(job.summary) if job.summary else {"size": _ending(job)} for job in jobs]
    for name in dict.fromkeys(name for row in rows for name in row):
        table.add_row(Text(name, "bold"), *(row.get(name, "") for row in rows))
    return table


def _ending(job: Job) -> str:
    """Return the state of a job that did not succeed, with its error."""
    return f"{job.state}: {job.error.message} ({job.error.code})" if job.error else job.state


def load_lines(job: Job, artifact: str) -> dict[str, str]:
    """Return format -> the Python lines that load this checkpoint of a succeeded job from the folder `artifact`."""
    from quantcore.export.loading import at_folder  # here: commands start without the engine

    lines = {}
    for name, export in (job.summary.exports if job.summary else {}).items():
        folder = artifact if export.path == "." else f"{artifact}/{export.path}"
        lines[name] = at_folder(export.load, export.path, folder)
    return lines


class Watch:
    """Shows the progress of several jobs; a context manager. Call `update` with each job that has changed."""

    def __init__(self, console: Console = out) -> None:
        from quantcore.events import Pace  # here: commands start without the engine

        self._console = console
        self._bars: dict[str, TaskID] = {}
        self._paces = defaultdict[str, Pace](Pace)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[title]:12}[/]"),
            TextColumn("{task.description:9}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def update(self, job: Job) -> None:
        """Show the present progress of this job."""
        title = job.name or job.preset or job.id
        bar = self._bars.get(job.id)
        if bar is None:
            bar = self._bars[job.id] = self._progress.add_task(
                "", total=None, start=False, title=escape(title), note=""
            )
        if job.started_at and not self._progress.tasks[bar].started:
            self._progress.start_task(bar)
        progress = job.progress if job.progress and job.progress.phase == job.phase else None
        note = ""
        if progress and not job.is_final:
            note = progress.unit + ("" if progress.eta_s is None else f", {progress.eta_s:.0f} s left")
        what = job.phase if job.state == "running" and job.phase else job.state
        done, total = (progress.done, progress.total) if progress else (0, None)
        if job.is_final:
            done, total = 1, 1
        self._progress.update(bar, description=what, completed=done, total=total, note=note)
        if job.is_final:
            self._progress.stop_task(bar)
        if not self._console.is_terminal and self._paces[job.id].is_due(what):
            self._console.print(f"{title}: {(progress and progress_text(job)) or what}", soft_wrap=True)

    @property
    def picture(self) -> RenderableType:
        """The present picture of all bars."""
        return self._progress.get_renderable()

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()
