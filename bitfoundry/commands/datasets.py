"""The commands `bitfoundry datasets upload`, `list`, `show`, `preview` and `delete`."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, show_deleted, with_client

if TYPE_CHECKING:
    from bitfoundry.client.service import Client

DatasetId = Annotated[str, typer.Argument(help="Dataset: its id or the start of it, its name, or `last`.")]


@with_client
def upload(
    client: Client,
    file: Annotated[Path, typer.Argument(help="A .jsonl, .json, .csv, .parquet or .txt file, or a gzipped one (.gz).")],
    name: Annotated[str | None, typer.Option(help="Name of the dataset. [default: the file's name]")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column with the text or the chat messages. [default: text, else messages]")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Resume this upload: upl_...")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file of calibration data. Every row is validated."""

    def say(upload_id: str) -> None:
        terminal.err.print(f"Uploading in parts. If it is interrupted, resume it with --resume {upload_id}")

    dataset = client.datasets.upload(file, name=name, column=column, upload_id=resume, on_begin=say)
    if as_json:
        terminal.print_json(dataset.model_dump(mode="json"))
    else:
        terminal.out.print(terminal.dataset_details(dataset, dataset.statistics))


@with_client
def list_datasets(
    client: Client,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of datasets.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List datasets, newest first."""
    datasets = list(islice(client.datasets.list(page_size=min(limit, 100)), limit))
    if as_json:
        terminal.print_json([dataset.model_dump(mode="json") for dataset in datasets])
    elif datasets:
        terminal.out.print(terminal.datasets_table(datasets))
    else:
        terminal.out.print("No datasets. Create one with `bitfoundry datasets upload`.")


@with_client
def show(
    client: Client,
    dataset_id: DatasetId,
    model: Annotated[
        str | None,
        typer.Option(help="Count tokens with this model's tokenizer: a path on the server, or org/name on the Hub."),
    ] = None,
    seq_len: Annotated[int, typer.Option(min=8, help="Tokens per calibration sample.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Show a dataset with its statistics: rows, lengths, empty rows, duplicates; with --model also tokens."""
    dataset = client.datasets.get(dataset_id)
    statistics = client.datasets.statistics(dataset_id, model=model, seq_len=seq_len)
    if as_json:
        terminal.print_json({**dataset.model_dump(mode="json"), "statistics": statistics})
    else:
        terminal.out.print(terminal.dataset_details(dataset, statistics))


@with_client
def preview(
    client: Client,
    dataset_id: DatasetId,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, max=100, help="Number of rows.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a dataset."""
    records = client.datasets.preview(dataset_id, rows=rows)
    if as_json:
        terminal.print_json([row.model_dump(mode="json") for row in records])
        return
    for row in records:
        terminal.out.print(f"{row.place}: {json.dumps(row.values, ensure_ascii=False)}", soft_wrap=True)


@with_client
def delete(client: Client, dataset_id: DatasetId, as_json: AsJson = False) -> None:
    """Delete a dataset. Refused while an unfinished job needs it."""
    client.datasets.delete(dataset_id)
    show_deleted(dataset_id, as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    "upload": upload,
    "list": list_datasets,
    "show": show,
    "preview": preview,
    "delete": delete,
}
