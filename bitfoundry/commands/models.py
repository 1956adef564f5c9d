"""The command `bitfoundry models`: the models that jobs used, and the results of one of them over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, with_client
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.model_answers import (
        BriefResult,
        ModelFolders,
        ModelResults,
        ParentResult,
        Recipe,
        Result,
        UsedModel,
    )
    from bitfoundry.client.service import Client

RECIPE_WIDTH = 22  # characters: beside it and the KL divergence an id still fits into a line of 80
NAME_WIDTH = 18  # beside the time


@with_client
def models(
    client: Client,
    model: Annotated[
        str | None, typer.Argument(help="Path on the server, or a model on the Hub: show its results over time.")
    ] = None,
    folders: Annotated[bool, typer.Option("--folders", help="List the models on the server instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models that jobs used, newest activity first, or the results of one MODEL."""
    if folders:
        if model is not None:
            raise BitfoundryError("--folders lists all models on the server", hint="leave MODEL out")
        on_server = client.model_folders()
        if as_json:
            terminal.print_json(on_server.model_dump(mode="json"))
        else:
            terminal.out.print(folders_details(on_server))
        return
    if model is not None:
        found = client.results_of(model)
        terminal.print_json(found.model_dump(mode="json")) if as_json else terminal.out.print(results_details(found))
        return
    used = [*client.models()]
    if as_json:
        terminal.print_json([each.model_dump(mode="json") for each in used])
    else:
        nothing = "No job has used a model yet. Create the first one: `bitfoundry submit MODEL --quant_scheme w4a16`."
        terminal.out.print(models_table(used) if used else nothing)


def folders_details(found: ModelFolders) -> RenderableType:
    """Return the models on the server as a table of paths and sizes."""
    rows = [(each.path, terminal.megabytes(each.size_bytes)) for each in found.data]
    table = _table(("model", "size"), rows) if rows else "No model was found below the folders that jobs may read."
    return table if found.is_complete else Group(table, "Not all folders were searched: there may be more models.")


def models_table(models: Sequence[UsedModel]) -> Table:
    """Return models as a table in the given order, each with its best result."""
    rows = [
        (f"{used.name}\n{used.active_at[:19]}", f"{used.num_jobs}\n{used.num_results}", _best_text(used.best))
        for used in models
    ]
    return _table(("model\nactive", "jobs\nresults", "best result\nsize and verdict"), rows)


def results_details(found: ModelResults) -> RenderableType:
    """Return a model with the result that it came from, and its results as a table."""
    about = terminal.pairs({"model": found.model, "derived from": _parent_text(found.derived_from)})
    if not found.data:
        return Group(about, "", "No job of this model has succeeded yet.")
    rows = [
        (
            f"{terminal.shortened(recipe_text(result.recipe), RECIPE_WIDTH)}\n{_size_text(result)}",
            f"{result.verdict or 'not measured'}\n{_kl_text(result)}",
            _job_text(result),
        )
        for result in found.data
    ]
    return Group(about, "", _table(("recipe\nsize", "verdict\nKL divergence", "job\nfinished, name"), rows))


def recipe_text(recipe: Recipe) -> str:
    """Return 'w4a16 + gptq', 'mix of w4a16, int8_weight_only', or 'auto for vllm on 24GB'."""
    return " + ".join([terminal.scheme_of(recipe), *(recipe.algorithms or ())])


def _best_text(best: BriefResult | None) -> str:
    if best is None:
        return "none measured"
    return f"{terminal.shortened(recipe_text(best.recipe), RECIPE_WIDTH)}\n{_size_text(best)}, {best.verdict}"


def _parent_text(parent: ParentResult | None) -> str:
    return f"{parent.model}, by {parent.job_id}" if parent else ""


def _size_text(result: BriefResult) -> str:
    """Return '90.0 MB (33 %)': the size, and its share of the original's."""
    before, after = result.size_before_bytes, result.size_after_bytes
    if after is None:
        return ""
    return terminal.megabytes(after) + (f" ({after / before:.0%})".replace("%", " %") if before else "")


def _kl_text(result: BriefResult) -> str:
    if result.kl_mean is None:
        return ""
    from quantcore.report.quality import Measure  # here: commands start without the engine

    return str(Measure(value=result.kl_mean, stderr=result.kl_stderr))


def _job_text(result: Result) -> str:
    name = terminal.shortened(result.name or "", NAME_WIDTH)
    lines = [result.job_id, f"{result.finished_at[:16]}  {name}".rstrip()]
    if result.publication:
        lines.append(result.publication.url or f"publication {result.publication.state}")
    return "\n".join([*lines, *(f"became {model}" for model in result.derived_models)])


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
