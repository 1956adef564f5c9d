"""``explain``: which layers of a result lose most, and what to do about them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, Home, Key, ResultName, Url
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from quantcore.report.values import Report

Layer = Annotated[str | None, typer.Argument(metavar="[LAYER]", help="Layer to show: its name, or the end of it.")]
ModelDir = Annotated[
    Path | None, typer.Option("--model_dir", "--model-dir", help="Original model. [default: as in the report]")
]


def explain(
    run: ResultName,
    layer: Layer = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of layers.")] = 15,
    model_dir: ModelDir = None,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers of a result lose most, one of them in detail, and the command that gives them more bits."""
    from quantcore.cli.layers_view import find_layer, read_weight, show_layer, show_layers
    from quantcore.errors import QuantError

    report, again = _read(run, url, api_key, home)
    try:
        chosen = None if layer is None else find_layer(report, layer)
    except QuantError as error:
        raise BitfoundryError.of(error) from error
    if as_json:
        layers = report.ranked_layers if chosen is None else [chosen]
        step = None if report.more_bits is None else report.more_bits.to_dict()
        terminal.print_json({"layers": [each.to_dict() for each in layers], "more_bits": step})
        return
    if chosen is None:
        show_layers(report, limit)
    else:
        folder = model_dir or (Path(report.model.path) if report.model.path else None)
        absent = f"the model is {report.model.name} on the Hub. Name a folder with --model_dir."
        show_layer(report, chosen, absent if folder is None else read_weight(folder, chosen.name, report.model.adapter))
    if report.more_bits is not None:
        terminal.out.print(f"{report.more_bits.text}\n  {again} {report.more_bits.flags}", soft_wrap=True)


def _read(run: str, url: str | None, api_key: str | None, home: Path | None) -> tuple[Report, str]:
    """Return the report of a result, and the beginning of the command that makes it again."""
    from bitfoundry.commands.results import read_result

    found = read_result(run, url, api_key, home)
    if found.report is None:
        raise BitfoundryError(
            f"{found.name} did not succeed, so it has no report.",
            code="not_ready",
            hint=f"`bitfoundry show {found.id}` says why.",
        )
    if found.folder is None:
        return found.report, f"bitfoundry clone {found.id}"
    made = shlex.join([found.report.model.path or found.report.model.name, "-o", f"{found.folder}-2"])
    return found.report, f"bitfoundry quantize {made}"
