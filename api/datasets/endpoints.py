"""The routes of datasets: upload a small file, list, inspect, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Form, Path, Query, Request, Response, UploadFile

from api.datasets import service, storage
from api.datasets.schemas import Column, DatasetOut, DatasetPage, DatasetStatisticsOut, PreviewOut, TokensOut
from api.http.bounded import bounded_route
from api.http.deps import ContextDep, SessionsDep
from api.http.disk_space import ROOM
from api.http.errors import may
from api.http.security import Reader, Writer
from api.http.turns import while_connected
from api.jobs.schemas import REVISION, Text
from api.store.accounts import datasets
from api.store.tables.jobs import Dataset
from quantcore.config.quantization import DATASET_ID

MAX_UPLOAD_BYTES = 16 << 20

router = APIRouter(prefix="/datasets", tags=["datasets"], route_class=bounded_route(MAX_UPLOAD_BYTES))

DatasetId = Annotated[str, Path(pattern=DATASET_ID)]


@router.post("", status_code=201, responses=may(413, 422, 507), dependencies=[ROOM])
async def upload_dataset(
    caller: Writer,
    context: ContextDep,
    request: Request,
    response: Response,
    file: UploadFile,
    name: Annotated[Text | None, Form(description="Name of the dataset. [default: the file's name]")] = None,
    column: Annotated[Column | None, Form()] = None,
) -> DatasetOut:
    """Upload a data file of up to 16 MiB: .jsonl, .json, .csv, .parquet or .txt, or one of these as .gz.

    Upload larger files in parts: `POST /v1/uploads`. Every row is checked before the response.
    """
    filename = file.filename or ""
    format = service.read_format(filename)

    async def take_in() -> Dataset:
        async with context.turns.take(caller.project_id, file.size or 0):
            with storage.receiving(context.settings, format) as path:
                received = await storage.write(path, _chunks_of(file))
                return await service.take_in(received, name or filename[:200], format, column, caller, context)

    dataset = await while_connected(request, take_in())
    response.headers["Location"] = f"/v1/datasets/{dataset.id}"
    return DatasetOut.of(dataset)


async def _chunks_of(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(storage.CHUNK_BYTES):
        yield chunk


@router.get("", responses=may(422))
def list_datasets(
    caller: Reader,
    sessions: SessionsDep,
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Annotated[str | None, Query(pattern=DATASET_ID, description="`next_cursor` of the previous page.")] = None,
) -> DatasetPage:
    """List the datasets, newest first; the Link header leads to the next page."""
    with sessions.begin() as session:
        rows = datasets.page(session, caller.project_id, limit=limit + 1, after=cursor)
    following = rows[limit - 1].id if len(rows) > limit else None
    if following:
        url = request.url.include_query_params(cursor=following)
        response.headers["Link"] = f'<{url.path}?{url.query}>; rel="next"'
    data = [DatasetOut.of(dataset) for dataset in rows[:limit]]
    return DatasetPage(data=data, has_more=following is not None, next_cursor=following)


@router.get("/{dataset_id}", responses=may(404))
def get_dataset(dataset_id: DatasetId, caller: Reader, sessions: SessionsDep) -> DatasetOut:
    """Return a dataset. It never changes."""
    with sessions.begin() as session:
        return DatasetOut.of(service.open_dataset(session, caller, dataset_id))


@router.delete("/{dataset_id}", status_code=204, responses=may(404, 409))
def delete_dataset(dataset_id: DatasetId, caller: Writer, context: ContextDep) -> None:
    """Delete a dataset and its file, unless a job that has not ended needs it."""
    service.remove(dataset_id, caller, context)


@router.get("/{dataset_id}/preview", responses=may(404))
async def preview_dataset(
    dataset_id: DatasetId,
    caller: Reader,
    context: ContextDep,
    request: Request,
    rows: Annotated[int, Query(ge=1, le=100)] = 5,
) -> PreviewOut:
    """Return the first rows, with long values cut short."""
    dataset = await service.find_dataset(context, caller, dataset_id)
    return PreviewOut.model_validate(await while_connected(request, service.preview(dataset, rows, context)))


@router.get("/{dataset_id}/statistics", responses=may(404, 422))
async def get_dataset_statistics(
    dataset_id: DatasetId,
    caller: Reader,
    context: ContextDep,
    request: Request,
    model: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=4096,
            description="Count tokens with this model's tokenizer: a folder, or an id on the Hub.",
        ),
    ] = None,
    revision: Annotated[str, Query(pattern=REVISION)] = "main",
    seq_len: Annotated[int, Query(ge=8, le=131072)] = 512,
) -> DatasetStatisticsOut:
    """Return the number of rows, empty rows and duplicates, and the lengths; with a model also in its tokens."""
    dataset = await service.find_dataset(context, caller, dataset_id)
    tokens = None
    if model is not None:
        counting = service.count_tokens(dataset, model, revision, seq_len, context)
        tokens = TokensOut.model_validate(await while_connected(request, counting))
    return DatasetStatisticsOut.model_validate({**dataset.statistics, "tokens": tokens})
