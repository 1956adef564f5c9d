"""Output in the terminal while the engine works, and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quantcore import events
from quantcore.config.recipes import algorithms_text
from quantcore.errors import QuantError
from quantcore.export.loading import at_folder

if TYPE_CHECKING:
    from quantcore.report.compare import Comparison
    from quantcore.report.evaluation_result import CacheQuality, EvaluationResult
    from quantcore.report.quality import Interval, PairedQuality, Step, Verdict
    from quantcore.report.values import Report

_console = Console(stderr=True)


@contextmanager
def progress_display() -> Iterator[events.Emit]:
    """Show the phase, the blocks done and the seconds left: as a bar, or as occasional lines without a terminal."""
    has_bar, pace, is_begun = _console.is_terminal or _console.is_jupyter, events.Pace(), False
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=_console, transient=True, disable=not has_bar) as progress:
        bar = progress.add_task("start", total=None, note="")

        def emit(event: events.Event) -> None:
            nonlocal is_begun
            if isinstance(event, events.LayerQuantized):
                is_begun = True
            elif isinstance(event, events.Saved) and not is_begun:
                line = f"continues after block {event.next_block} of {event.num_blocks}, which an earlier run saved"
                progress.console.print(line, highlight=False)
            elif isinstance(event, events.PhaseStarted):
                progress.reset(bar, description=event.phase, total=None, note="")
                if not has_bar and pace.is_due(event.phase):
                    _console.print(event.phase, highlight=False)
            elif isinstance(event, events.Progress):
                left = "" if event.eta_s is None else f"{event.unit}s, {event.eta_s:.0f} s left"
                progress.update(bar, completed=event.done, total=event.total, note=left)
                if not has_bar and pace.is_due(event.phase):
                    rest = "" if event.eta_s is None else f", {event.eta_s:.0f} s left"
                    line = f"{event.phase}: {event.unit} {event.done} of {event.total}{rest}"
                    _console.print(line, highlight=False, soft_wrap=True)
            elif isinstance(event, events.Warned):
                progress.console.print(f"[yellow]warning[/] {event.message}", highlight=False)

        yield emit


def show_report(report: Report, output_dir: str, command_of: Callable[[Step, int], str] | None = None) -> None:
    """Show the summary as a table, the lines of code that load the result, and its next steps.

    ``command_of`` returns the command of a step and a number for its result, from 2; None where the command line that
    made the result is not known.
    """
    summary, worst = report.summary, report.summary.worst_layer
    steps: Sequence[Step] = ()
    table = Table(show_header=False, box=None)
    planned = _mega(summary.planned_peak_memory_bytes)
    rows = [
        ("size", f"{_mega(summary.size_before_bytes)} -> {_mega(summary.size_after_bytes)}"),
        ("algorithms", algorithms_text(report.config)),
        (worst.title, str(worst)),
        ("time", f"{summary.total_s:.1f} s"),
        ("peak memory", f"{_mega(summary.peak_memory_bytes)} (planned: {planned})"),
        ("written to", output_dir),
    ]
    if (page := Path(output_dir) / "report.html").is_file():
        rows.append(("answers, layers", str(page)))
    if report.answers is not None:
        rows.insert(1, ("own answers", str(report.answers)))
    if report.behaviour is not None:
        rows.insert(2 if report.answers is not None else 1, ("behaviour", str(report.behaviour)))
    before, after, ratio = summary.perplexity_before, summary.perplexity_after, summary.perplexity_ratio
    if before is not None and after is not None and ratio is not None:
        text = f"{before:.3f} -> {after:.3f} ({100 * (ratio - 1):+.2f} %)"
        rows.insert(1, ("perplexity", text))
    if report.encoder is not None:
        rows[1:1] = report.encoder.rows
    if summary.verdict is not None:
        steps = summary.verdict.steps
        rows[:0] = [row for row in _verdict_rows(summary.verdict) if not (steps and row[0] == "advice")]
    if report.clipping:
        kind, share = max(report.clipping.items(), key=lambda item: item[1])
        rows.append(("clipped values", f"at most {share:.3%}, of {kind}"))
    if report.goal is not None:
        rows.insert(0, ("goal", report.goal.why))
        rows += [("other sizes" if number == 0 else "", text) for number, text in enumerate(report.goal.advice)]
    if report.distillation is not None:
        rows.append(("distillation", str(report.distillation)))
    rows += [(f"check, {name}", str(proof.consumer_check)) for name, proof in report.proof.items()]
    for name, text in rows:
        table.add_row(f"[bold]{name}[/]", Text(text))
    out = Console()
    out.print(table)
    if report.kv_caches:
        _show_caches(out, report.kv_caches)
    show_failed_tasks(summary.failed_tasks)
    for export in summary.exports.values():
        folder = output_dir if export.path == "." else f"{output_dir}/{export.path}"
        out.print(at_folder(export.load, export.path, folder), highlight=False, markup=False, soft_wrap=True)
        for reason in export.refusals.values():
            out.print(reason, highlight=False, markup=False, soft_wrap=True)
    for number, step in enumerate(steps, 2):
        out.print(
            step.text + (f"\n  {command_of(step, number)}" if command_of else ""),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _verdict_rows(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the verdict in words, its level with the reason, and the advice."""
    rows = (("result", verdict.sentence), ("verdict", str(verdict)), ("advice", verdict.advice))
    return [(name, text) for name, text in rows if text]


def show_evaluation(result: EvaluationResult) -> None:
    """Show perplexities, the distance from the original, and tasks."""
    from quantcore.report.quality import Quality, TaskResult, metric_title

    quality = result.quality
    assert quality is not None
    both = quality if isinstance(quality, Quality) else None
    before = dict(both.before.rows) if both else {}
    table = Table("", "original", "model", box=None)
    for name, after in quality.after.rows:
        table.add_row(name, f"{before.get(name, '–')}", str(after))
    for task, metrics in result.harness.items():
        for metric, measure in metrics.items():
            pair = measure if isinstance(measure, TaskResult) else TaskResult(original=None, quantized=measure)
            table.add_row(f"{task} {metric_title(metric)}", f"{pair.original or '–'}", str(pair.quantized))
    if both:
        table.add_row("kl mean", "", str(both.divergence.kl_mean))
        table.add_row("top1 agreement", "", str(both.divergence.top1_agreement))
        for each in both.by_position:
            table.add_row(f"kl mean, positions {each}", "", str(each.kl_mean))
    if result.answers is not None:
        table.add_row("own answers", "", str(result.answers))
    if result.behaviour is not None:
        for name, original, quantized, outcome in result.behaviour.rows:
            table.add_row(name, original, f"{quantized} ({outcome})")
        table.add_row("behaviour", "", Text(str(result.behaviour)))
    if result.verdict is not None:
        for name, text in _verdict_rows(result.verdict):
            table.add_row(name, "", text)
    if result.drafts is not None:
        table.add_row("drafts accepted", f"{result.drafts.before or '–'}", str(result.drafts.after))
    out = Console()
    out.print(table)
    show_failed_tasks(result.failed_tasks)
    out.print(
        f"{quality.num_tokens} tokens in {quality.num_windows} windows; in brackets: the 95 % interval", style="dim"
    )
    if result.kv_caches:
        _show_caches(out, result.kv_caches)
    if result.served_by:
        programs = ", ".join(f"{name} {version}" for name, version in result.served_by.items())
        out.print(f"Tasks were run in {programs}.", style="dim")


def _show_caches(out: Console, caches: Sequence[CacheQuality]) -> None:
    """Show what each dtype of the KV cache costs, its size, and how to choose it."""
    from quantcore.report.evaluation_result import heads_of_caches, notes_on_caches

    table = Table(*heads_of_caches(caches), box=None)
    for each in caches:
        table.add_row(*each.row)
    out.print(table)
    for note in notes_on_caches(caches):
        out.print(note, style="dim", highlight=False)


def show_failed_tasks(failed: dict[str, str]) -> None:
    """Show the requested tasks that have no result."""
    for task, reason in failed.items():
        _console.print(f"[bold red]error[/] The task {task} failed: {reason}", highlight=False, soft_wrap=True)


def show_speed(found: dict[str, Any]) -> None:
    """Show the speed of the model beside that of its original."""
    rows: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("load_s", "load", "{:.1f} s".format),
        ("prompt_tokens_per_s", "prompt", "{:.1f} tokens/s".format),
        ("new_tokens_per_s", "generation", "{:.1f} tokens/s".format),
        ("peak_memory_bytes", "peak memory", _mega),
        ("peak_device_bytes", "peak device memory", _mega),
    )
    columns = [column for column in (found.get("against"), found["model"]) if column is not None]
    table = Table("", *(["original"] if "against" in found else []), "model", "ratio", box=None)
    for name, title, text in rows:
        if found["model"][name] is not None:
            ratio = found.get("ratio", {}).get(name)
            table.add_row(title, *(text(column[name]) for column in columns), "" if ratio is None else f"{ratio:.2f}")
    out, load = Console(), found["load"]
    out.print(table)
    out.print(
        f"{found['runtime']} {found['version']}, {found['num_threads']} threads, {load['batch_size']} x"
        f" {load['prompt_len']} prompt tokens, {load['num_new']} generated; median of {load['repeats']}",
        style="dim",
    )


def show_comparison(comparison: Comparison) -> None:
    """Show one row per result, from the smallest; a star marks those on the Pareto front.

    Below it stands what a paired test on the same tokens finds, from the first result named to each other one.
    """
    table = Table("", "result", "scheme", "size", "perplexity", "mean KL", "failed gates", box=None)
    for row in comparison.rows:
        numbers = (str(row.perplexity), str(row.kl), str(row.num_failed_gates))
        table.add_row("*" if row.is_front else "", row.name, row.scheme, _mega(row.size_bytes), *numbers)
    out = Console()
    out.print(table)
    for row in comparison.rows:
        if row.change is not None:
            text = f"{row.change.verdict}, KL {_percent(row.change.kl_change)}"
        elif row.not_tested is not None:
            text = f"not tested. {row.not_tested}"
        else:
            continue
        out.print(f"{row.name} against {comparison.first}: {text}", highlight=False, markup=False, soft_wrap=True)
    for warning in comparison.warnings:
        out.print(f"[yellow]warning[/] {warning}", highlight=False)


def show_change(pair: PairedQuality) -> None:
    """Show the old and the new result, the changes with their intervals, and the verdict."""
    new, old = pair.new_quality, pair.old_quality
    ratio, top1 = pair.perplexity_ratio, pair.top1_difference
    perplexity = ratio.replace(value=ratio.value - 1, low=ratio.low - 1, high=ratio.high - 1)
    table = Table("", "old", "new", "change (95 %)", box=None)
    for name, before, after, change in (
        ("mean KL", old.divergence.kl_mean, new.divergence.kl_mean, _percent(pair.kl_change)),
        ("perplexity", old.after.token_perplexity, new.after.token_perplexity, _percent(perplexity)),
        (
            "top-1",
            old.divergence.top1_agreement,
            new.divergence.top1_agreement,
            f"{top1.value:+.4f} ({top1.low:+.4f} to {top1.high:+.4f})",
        ),
    ):
        table.add_row(name, str(before), str(after), change)
    out = Console()
    out.print(table)
    beyond = f" beyond the tolerance of {100 * pair.tolerance:g} %" if pair.tolerance else ""
    out.print(f"[bold]{pair.verdict}[/]{beyond}: {pair.new} against {pair.old}", highlight=False, soft_wrap=True)
    out.print(
        f"{new.num_tokens} tokens in {new.num_windows} windows; in brackets: the 95 % interval. A rise of the KL by"
        f" {100 * pair.smallest_kl_change:.2g} % or more is found 19 times in 20.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    spread = "The interval does not cover what another seed would change: give several results of each recipe for that."
    if pair.seed_deviation is not None:
        spread = f"The KL of results of one recipe deviates by {100 * pair.seed_deviation:.2g} % from seed to seed."
    out.print(spread, style="dim", highlight=False, soft_wrap=True)


def _percent(change: Interval) -> str:
    return f"{100 * change.value:+.2f} % ({100 * change.low:+.2f} to {100 * change.high:+.2f})"


def show_mix(found: dict[str, Any]) -> None:
    """Show the scheme of each unit (a row for each kind, a column for each block), then sizes and divergences."""
    schemes = list(found["uniform"])
    letters = dict(zip(schemes, ascii_uppercase, strict=False))
    colours = dict(zip(schemes, ("cyan", "yellow", "magenta", "green", "blue", "red"), strict=False))
    rows: dict[str, Text] = {}
    for unit in found["units"]:
        kind = ", ".join(dict.fromkeys(name.split(".")[-1] for name in unit["layers"]))
        rows.setdefault(kind, Text()).append(letters[unit["scheme"]], style=colours.get(unit["scheme"], ""))
    out = Console()
    blocks = Table("", "blocks, first to last", box=None)
    for kind, row in rows.items():
        blocks.add_row(kind, row)
    out.print(blocks)
    sizes = Table("", "", "layers", "size", "bits per weight", "KL (estimated)", box=None)
    for name, mix in (("mix", found["mix"]), *found["uniform"].items()):
        letter = Text(letters.get(name, ""), style=colours.get(name, ""))
        layers = ", ".join(f"{num} {scheme}" for scheme, num in mix["layers"].items()) if name == "mix" else "all"
        sizes.add_row(letter, name, layers, _mega(mix["size_bytes"]), f"{mix['bits']:.2f}", f"{mix['loss']:.2g}")
    out.print(sizes)
    from quantcore.report.quality import Quality

    measured = Quality.model_validate(found["mix"]["measured"])
    out.print(
        f"mix measured without GPTQ: mean KL {measured.divergence.kl_mean}, "
        f"perplexity {measured.before.token_perplexity} -> {measured.after.token_perplexity}",
        highlight=False,
    )


def explain(error: QuantError) -> None:
    """Print an error for a person: what is wrong, what to do, its code."""
    _console.print(f"[bold red]error[/] {error.message}", highlight=False, soft_wrap=True)
    if error.hint:
        _console.print(f"      {error.hint}", highlight=False, soft_wrap=True)
    _console.print(f"      [dim]{error.code}[/]", highlight=False)


def _mega(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
